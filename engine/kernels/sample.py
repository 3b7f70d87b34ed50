"""Sampling on the device without a sort: the rules of `engine/sampler.py`, fused with its writes.

One pass over the logits finds the maxima of small groups, and the sums of weights of larger chunks
where the settings need them. Greedy, and sampling from everything, then read one group or chunk
again. For top-k and top-p the k-th largest maximum bounds the k-th logit from below: only groups
that reach it are read again, the few values above it are packed in vocabulary order, cut exactly,
and drawn from. Rows whose values do not fit (ties, a wide nucleus) and top_k above 256 go through
the whole-row kernel, which finds thresholds by radix descent. Thresholds and draws are exact;
weights are float32 exponentials summed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.kernels.sample_kernels import group_maxima_kernel, pick_kernel, whole_row_kernel
from engine.sampler import SamplingParams

MAX_FAST_TOP_K = 256
NUCLEUS_VALUES = 256  # at the least, that top-p without top-k looks at before a whole row
MANY_ROWS = 1024
MIN_TEMPERATURE = 1e-30  # below it float32 quotients lose 0 / temperature
ZERO_LOW_BITS = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}  # multiples of 4


@dataclass(frozen=True, slots=True)
class SamplerTuning:
    """How the kernels are launched; measured by benchmarks/bench_kernels.py."""

    chunk: int = 4096  # logits of one program of the first pass
    maxima_warps: int = 8
    pick_tile: int = 8
    pick_warps: int = 4
    pick_warps_many: int = 2  # for more rows than MANY_ROWS
    whole_block: int = 4096
    whole_warps: int = 16


class DeviceSampler:
    """One run's sampler: fixed settings, workspace for up to `max_rows` at a time."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        max_rows: int,
        device: torch.device | str,
        tuning: SamplerTuning | None = None,
    ) -> None:
        self.params, self.vocab_size = params, vocab_size
        self.tuning = tuning or SamplerTuning()
        self.top_k = params.effective_top_k(vocab_size)
        self.group = 64 if vocab_size <= 1 << 16 else 128
        self.num_groups = triton.cdiv(vocab_size, self.group)
        self.num_chunks = triton.cdiv(vocab_size, self.tuning.chunk)
        self.mode = self._mode()
        self.bound_rank = NUCLEUS_VALUES if self.mode == "top-p" else self.top_k
        self.capacity = max(256, triton.next_power_of_2(4 * self.bound_rank))

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((max_rows, width), dtype=dtype, device=device)

        packed = self.mode in ("top-k", "top-p")
        self._group_max = empty(self.num_groups, torch.float32)
        self._chunk_max = empty(self.num_chunks, torch.float32)
        self._chunk_sum = empty(self.num_chunks, torch.float32)
        self._kept_groups = empty(self.num_groups if packed else 0, torch.int32)
        self._values = empty(self.capacity if packed else 0, torch.float32)
        self._ids = empty(self.capacity if packed else 0, torch.int32)
        self._whole_row = empty(1, torch.uint8)

    def _mode(self) -> str:
        """What the pick kernel does after the first pass; "rows" leaves it all to whole rows."""
        if self.params.temperature == 0:
            return "greedy"
        if self.top_k:
            return "top-k" if self.top_k <= min(MAX_FAST_TOP_K, self.num_groups) else "rows"
        return "top-p" if self.params.top_p < 1.0 else "all"

    def __call__(
        self,
        logits: Tensor,  # [rows, vocab], contiguous rows, bfloat16, float16 or float32
        stream_key: Tensor,  # [2] int32: low and high word
        candidates: Tensor,  # [rows] int32 or int64
        step: Tensor,  # int32 device scalar: answer tokens generated before
        tokens: Tensor,  # [rows, columns] integers
        last_token: Tensor,  # [rows] integers: the next step's input
        done: Tensor,  # [rows] int32
        bad: Tensor,  # [rows] bool
        stop_ids: Tensor,  # [a power of two] integers; those below 0 stand for none
        column: Tensor | None = None,  # int32 device scalar: where in `tokens`; default `step`
    ) -> None:
        """Sample one token a row and write it to `tokens[row, column]` and `last_token[row]`.

        A row of NaN, +inf or nothing but -inf sets `bad[row]`. `done[row]`, where it is 0, becomes
        `column + 1` by a stop id and `-(column + 1)` by a bad row.
        """
        rows, vocab = logits.shape
        assert vocab == self.vocab_size and logits.stride(1) == 1, "logits of another shape"
        assert rows <= len(self._whole_row), "more rows than the workspace has"
        writes = (
            stream_key,
            candidates,
            step,
            step if column is None else column,
            tokens,
            tokens.stride(0),
            last_token,
            done,
            bad.view(torch.uint8),
            stop_ids,
        )
        if self.mode != "rows":
            self._launch_pick(logits, writes)
        if self.mode not in ("greedy", "all"):
            self._launch_whole_rows(logits, writes)

    def _launch_pick(self, logits: Tensor, writes: tuple) -> None:
        rows, vocab = logits.shape
        temperature = max(self.params.temperature, MIN_TEMPERATURE)
        group_maxima_kernel[(rows * self.num_chunks,)](
            logits,
            logits.stride(0),
            self._group_max,
            self._chunk_max,
            self._chunk_sum,
            vocab,
            self.num_groups,
            self.num_chunks,
            temperature,
            MASS=self.mode in ("top-p", "all"),
            GROUP=self.group,
            GROUPS=self.tuning.chunk // self.group,
            num_warps=self.tuning.maxima_warps,
        )
        many = rows > MANY_ROWS
        warps = self.tuning.pick_warps_many if many else self.tuning.pick_warps
        pick_kernel[(rows,)](
            logits,
            logits.stride(0),
            self._group_max,
            self._chunk_max,
            self._chunk_sum,
            self._kept_groups,
            self._values,
            self._ids,
            self._whole_row,
            *writes,
            vocab,
            self.num_groups,
            self.num_chunks,
            self.bound_rank,
            temperature,
            MODE=self.mode,
            TOP_P=self.params.top_p,
            LOW_BITS=ZERO_LOW_BITS[logits.dtype],
            GROUP=self.group,
            GROUPS_PAD=triton.next_power_of_2(self.num_groups),
            CHUNK=self.tuning.chunk,
            CHUNKS_PAD=max(2, triton.next_power_of_2(self.num_chunks)),
            TILE=self.tuning.pick_tile,
            CAPACITY=self.capacity,
            STOPS=len(writes[-1]),
            num_warps=warps,
        )

    def _launch_whole_rows(self, logits: Tensor, writes: tuple) -> None:
        rows, vocab = logits.shape
        whole_row_kernel[(rows,)](
            logits,
            logits.stride(0),
            self._whole_row,
            *writes,
            vocab,
            self.top_k,
            max(self.params.temperature, MIN_TEMPERATURE),
            FLAGGED=self.mode != "rows",
            TOP_K=self.top_k > 0,
            TOP_P=self.params.top_p,
            LOW_BITS=ZERO_LOW_BITS[logits.dtype],
            BLOCK=self.tuning.whole_block,
            STOPS=len(writes[-1]),
            num_warps=self.tuning.whole_warps,
        )
