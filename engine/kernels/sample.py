"""Sampling on the device without a sort: the rules of `engine/sampler.py`, fused with its writes.

Fast path (top_k up to 256, or greedy), one pass over the logits: maxima of small groups; the k-th
largest of them bounds the k-th logit from below, so only groups that reach the bound are read
again; the few values in them above it are packed in vocabulary order, cut exactly, and drawn from.
Rows with too many ties for the buffer, other settings of top_k, and top_p alone go through the
whole-row kernel, which finds thresholds by radix descent, 16 at a time. Thresholds and draws are
exact; weights are float32 exponentials summed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.kernels.sample_kernels import group_maxima_kernel, pick_kernel, whole_row_kernel
from engine.sampler import SamplingParams

MAX_FAST_TOP_K = 256
MAX_STOP_IDS = 16
MIN_TEMPERATURE = 1e-30  # below it float32 quotients lose 0 / temperature
ZERO_LOW_BITS = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}  # multiples of 4


@dataclass(frozen=True, slots=True)
class SamplerTuning:
    """How the kernels are launched; measured by benchmarks/bench_kernels.py."""

    maxima_elements: int = 4096
    maxima_warps: int = 4
    pick_tile: int = 16
    pick_warps: int = 4
    whole_block: int = 1024
    whole_warps: int = 4


class DeviceSampler:
    """One run's sampler: fixed settings and stop ids, workspace for up to `max_rows` at a time."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        max_rows: int,
        stop_ids: list[int],
        device: torch.device | str,
        tuning: SamplerTuning | None = None,
    ) -> None:
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}")
        self.params, self.vocab_size = params, vocab_size
        self.tuning = tuning or SamplerTuning()
        self.top_k = params.effective_top_k(vocab_size)
        self.greedy = params.temperature == 0
        self.group = 64 if vocab_size <= 1 << 16 else 128
        self.num_groups = triton.cdiv(vocab_size, self.group)
        few = 0 < self.top_k <= min(MAX_FAST_TOP_K, self.num_groups)
        self.fast = self.greedy or few
        self.capacity = max(256, triton.next_power_of_2(4 * self.top_k)) if few else 16
        padded = stop_ids + [-1] * (MAX_STOP_IDS - len(stop_ids))
        self.stop_ids = torch.tensor(padded, dtype=torch.int32, device=device)

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((max_rows, width), dtype=dtype, device=device)

        width = self.num_groups if self.fast else 0
        self._group_max = empty(width, torch.float32)
        self._kept_groups = empty(width, torch.int32)
        self._values = empty(self.capacity if self.fast else 0, torch.float32)
        self._ids = empty(self.capacity if self.fast else 0, torch.int32)
        self._whole_row = empty(1, torch.uint8)

    def __call__(
        self,
        logits: Tensor,  # [rows, vocab], contiguous rows, bfloat16, float16 or float32
        stream_key: Tensor,  # [2] int32: low and high word
        candidates: Tensor,  # [rows] int32 or int64
        step: Tensor,  # int32 device scalar: answer tokens generated before
        tokens: Tensor,  # [rows, columns] integers
        last_token: Tensor,  # [rows] integers: the next step's input
        done: Tensor,  # [rows] bool
        bad: Tensor,  # [rows] bool
        column: Tensor | None = None,  # int32 device scalar: where in `tokens`; default `step`
    ) -> None:
        """Sample one token a row and write it to `tokens[row, column]` and `last_token[row]`.

        `done[row]` is set by a stop id and by a bad row, `bad[row]` by a row of NaN, +inf or
        nothing but -inf that was not done before; neither is ever cleared here.
        """
        rows, vocab = logits.shape
        assert vocab == self.vocab_size and logits.stride(1) == 1, "logits of another shape"
        assert rows <= len(self._whole_row), "more rows than the workspace has"
        low_bits = ZERO_LOW_BITS[logits.dtype]
        temperature = max(self.params.temperature, MIN_TEMPERATURE)
        writes = (
            stream_key,
            candidates,
            step,
            step if column is None else column,
            tokens,
            tokens.stride(0),
            last_token,
            done.view(torch.uint8),
            bad.view(torch.uint8),
            self.stop_ids,
        )
        if self.fast:
            groups = self.tuning.maxima_elements // self.group
            programs = triton.cdiv(self.num_groups, groups)
            group_maxima_kernel[(rows * programs,)](
                logits,
                logits.stride(0),
                self._group_max,
                vocab,
                self.num_groups,
                programs,
                GROUP=self.group,
                GROUPS=groups,
                num_warps=self.tuning.maxima_warps,
            )
            pick_kernel[(rows,)](
                logits,
                logits.stride(0),
                self._group_max,
                self._kept_groups,
                self._values,
                self._ids,
                self._whole_row,
                *writes,
                vocab,
                self.num_groups,
                self.top_k,
                temperature,
                GREEDY=self.greedy,
                TOP_P=self.params.top_p,
                LOW_BITS=low_bits,
                GROUP=self.group,
                GROUPS_PAD=triton.next_power_of_2(self.num_groups),
                TILE=self.tuning.pick_tile,
                CAPACITY=self.capacity,
                STOPS=MAX_STOP_IDS,
                num_warps=self.tuning.pick_warps,
            )
        if not self.greedy:
            whole_row_kernel[(rows,)](
                logits,
                logits.stride(0),
                self._whole_row,
                *writes,
                vocab,
                self.top_k,
                temperature,
                FLAGGED=self.fast,
                TOP_K=self.top_k > 0,
                TOP_P=self.params.top_p,
                LOW_BITS=low_bits,
                BLOCK=self.tuning.whole_block,
                STOPS=MAX_STOP_IDS,
                num_warps=self.tuning.whole_warps,
            )
