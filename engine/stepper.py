"""One decode step on the device, and how steps are launched.

`step_rows` is the whole of a step for a slice of rows: embedding, layers, logits, sampling. The
eager stepper runs it as it is, in chunks of rows that fit in memory; the graph stepper
(engine/cuda_graph.py) records it once for each number of rows and replays it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.decode_state import DecodeState
from engine.memory import Chunk
from engine.model import Transformer
from engine.ops import Ops
from engine.sampler import SamplingParams, sample

ROW_MULTIPLE = 8  # rows are padded to it: below 12 rows a CPU's matrix product rounds by row count


class Sampler(Protocol):
    """Samples a token a row into the state: history, next_tokens, done, bad.

    A row's first end since the host's last look counts: a stop token, or logits without a finite
    value.
    """

    def __call__(self, logits: torch.Tensor, state: DecodeState, rows: slice) -> None: ...


class TorchSampler:
    """The plain sampler, with the host's counters; see engine/sampler.py."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __call__(self, logits: torch.Tensor, state: DecodeState, rows: slice) -> None:
        tokens, bad = sample(
            logits, self.params, state.host_stream_key, state.candidates[rows], state.host_step
        )
        state.history[rows, state.host_block_step] = tokens
        state.next_tokens[rows] = tokens
        state.bad[rows] |= bad
        runs = state.done[rows] == 0
        state.done[rows] += runs * how_ended(tokens, bad, state) * (state.host_block_step + 1)


def how_ended(tokens: torch.Tensor, bad: torch.Tensor, state: DecodeState) -> torch.Tensor:
    """1 for a stop token, -1 for a bad row, 0 for one that goes on."""
    return torch.where(bad, -1, torch.isin(tokens, state.stop_ids).to(torch.int32))


class Stepper(Protocol):
    """Runs decode steps for the first `num_rows` rows of the state."""

    capture_sec: float  # spent on recording steps since the prompt began

    def run(self, num_rows: int, steps: int) -> None: ...


class EagerStepper:
    """Launches every operation from the host."""

    def __init__(
        self, model: Transformer, ops: Ops, state: DecodeState, sampler: Sampler, chunk: Chunk
    ) -> None:
        self.model, self.ops, self.state, self.sampler = model, ops, state, sampler
        self.chunk = chunk
        self.capture_sec = 0.0  # nothing is recorded

    def run(self, num_rows: int, steps: int) -> None:
        for _ in range(steps):
            self.state.host_length += 1
            self.state.before_step()
            self.chunk.retrying(lambda: self._forward(padded(num_rows)), padded(num_rows))
            self.state.after_step()
            self.state.count_on_host()

    def _forward(self, num_rows: int) -> None:
        size = padded(self.chunk.size)
        for first in range(0, num_rows, size):
            rows = slice(first, min(first + size, num_rows))
            step_rows(self.model, self.ops, self.state, self.sampler, rows)


def step_rows(
    model: Transformer, ops: Ops, state: DecodeState, sampler: Sampler, rows: slice
) -> None:
    """Append the rows' tokens and sample their next ones.

    NOTE: safe to run again after a failure: it reads `tokens` and writes `next_tokens`.
    """
    sampler(model.logits(model.decode(ops, state, rows)), state, rows)


def padded(rows: int) -> int:
    """Rows of a batch, padding included."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def bucket(rows: int) -> int:
    """The number of rows that a step is recorded for: an eighth apart at the most, finer above."""
    octave = 1 << max(0, (rows - 1).bit_length() - 1)
    step = max(8, octave // (8 if rows <= 512 else 16))
    return -(-rows // step) * step


def num_buckets(max_rows: int) -> int:
    """How many different steps are recorded as `max_rows` rows finish one by one."""
    return len({min(bucket(rows), max_rows) for rows in range(1, max_rows + 1)})
