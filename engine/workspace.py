"""What the largest forward passes take beside weights and caches, measured once.

Runs one decode step of many rows and one packed reading on throw-away caches, and looks at the
allocator's peak, and at the host's seconds for launching a step. Only meaningful on a GPU; a CPU's
budget is far from its memory. Where a pass does not fit, a smaller one is measured: the run will
find the same and split its passes too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.decode_state import DecodeState
from engine.kv_cache import PagedKV
from engine.memory import Chunk
from engine.model import Transformer
from engine.ops import Ops
from engine.packing import pack
from engine.stepper import Sampler, step_rows

PROBE_PROMPT, PROBE_ANSWER = 128, 256  # tokens of the sequences that are read


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes at the peak of one pass, beside what was allocated before it; seconds to launch one."""

    decode_bytes: int = 0
    read_bytes: int = 0
    launch_sec: float = 0.0  # of a decode step, on the host alone


def measure_workspace(
    model: Transformer,
    reader: Transformer,
    ops: Ops,
    sampler: Sampler,
    *,
    rows: int,
    tokens: int,
    page_size: int,
) -> Workspace:
    """A decode step of `rows` rows, and reading `tokens` new tokens behind a short prompt."""
    step = Chunk("rows of the planned step", rows)
    read = Chunk("tokens of the planned reading", tokens, smallest=PROBE_ANSWER)
    decode_bytes, launch_sec = _largest(
        step, lambda: _measure_step(model, ops, sampler, step.size, page_size)
    )
    read_bytes, _ = _largest(read, lambda: _measure_read(reader, ops, read.size))
    return Workspace(decode_bytes, read_bytes, launch_sec)


Measured = tuple[int, float]  # peak bytes, seconds of launching


def _largest(chunk: Chunk, measure: Callable[[], Measured]) -> Measured:
    """What the largest pass that fits takes."""
    found: list[Measured] = []
    chunk.retrying(lambda: found.append(measure()))
    return found[-1]


def _measure_step(
    model: Transformer, ops: Ops, sampler: Sampler, rows: int, page_size: int
) -> Measured:
    cache = _probe_cache(model, page_size, rows, 1)
    state = DecodeState.allocate(cache, rows, 1)
    state.begin(1, 0)
    cache.prompt_len = state.host_length = 1
    state.before_step()  # NOTE: all rows write to the padding page; what it holds is never read
    return _measure(model.device, lambda: step_rows(model, ops, state, sampler, slice(0, rows)))


def _measure_read(model: Transformer, ops: Ops, tokens: int) -> Measured:
    cache = _probe_cache(model, 16, 1, PROBE_PROMPT)
    cache.prompt_len = PROBE_PROMPT
    lengths = [PROBE_ANSWER] * max(1, tokens // PROBE_ANSWER)
    ids = torch.zeros(sum(lengths), dtype=torch.int64, device=model.device)
    packing = pack(cache, lengths)
    return _measure(model.device, lambda: model.extend(ops, ids, packing))


def _probe_cache(model: Transformer, page_size: int, rows: int, prompt: int) -> PagedKV:
    return PagedKV(
        model.config,
        num_pages=0,
        page_size=page_size,
        max_rows=rows,
        max_row_tokens=page_size,
        max_prompt=prompt,
        dtype=model.dtype,
        device=model.device,
    )


@torch.inference_mode()
def _measure(device: torch.device, work: Callable[[], object]) -> Measured:
    work()  # compiles kernels and makes handles, whose memory is not the pass's
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    work()
    launch_sec = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, launch_sec
