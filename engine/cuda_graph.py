"""Decode steps as CUDA graphs: recorded once for a number of rows, replayed for every token.

A graph holds a whole step: embedding, layers, logits, sampling, the counters. All tensors it
touches keep their addresses for the life of the decoder, so a graph serves every prompt. Row counts
are rounded up to a bucket; as rows finish, steps move on to the next smaller graph. What does not
fit in memory as one graph is cut into slices of rows within it.
"""

from __future__ import annotations

import logging
import time

import torch

from engine.decode_state import DecodeState
from engine.memory import Chunk
from engine.model import Transformer
from engine.ops import Ops
from engine.stepper import Sampler, bucket, padded, step_rows
from engine.triton_ops import prompt_class

logger = logging.getLogger(__name__)


class GraphStepper:
    """Replays steps; records a graph where a bucket is met for the first time."""

    def __init__(
        self, model: Transformer, ops: Ops, state: DecodeState, sampler: Sampler, chunk: Chunk
    ) -> None:
        self.model, self.ops, self.state, self.sampler = model, ops, state, sampler
        self.chunk = chunk
        self.max_rows = len(state.tokens)
        self.capture_sec = 0.0
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, num_rows: int, steps: int) -> None:
        graph = self._graph(min(bucket(num_rows), self.max_rows))
        for _ in range(steps):
            graph.replay()
        self.state.host_length += steps
        self.state.host_step += steps
        self.state.host_block_step += steps

    def _graph(self, rows: int) -> torch.cuda.CUDAGraph:
        prompt = prompt_class(self.state.cache.prompt_len)
        found = self._graphs.get((rows, self.chunk.size, prompt))
        if found is None:
            start = time.perf_counter()
            self.chunk.retrying(lambda: self._record(rows, prompt))
            found = self._graphs[rows, self.chunk.size, prompt]
            self.capture_sec += time.perf_counter() - start
            logger.info("recorded the step of %d rows", rows)
        return found

    def _record(self, rows: int, prompt: int) -> None:
        self._rehearse(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(rows)
        self._graphs[rows, self.chunk.size, prompt] = graph

    def _rehearse(self, rows: int) -> None:
        """Run the step once, so that kernels are compiled; its traces in the state are undone.

        What it writes to the cache, the coming step writes again.
        """
        changed = self.state.changed_by_step()
        before = [tensor.clone() for tensor in changed]
        self._step(rows)
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
        torch.cuda.synchronize()

    def _step(self, rows: int) -> None:
        self.state.before_step()
        size = padded(self.chunk.size)
        for first in range(0, rows, size):
            piece = slice(first, min(first + size, rows))
            step_rows(self.model, self.ops, self.state, self.sampler, piece)
        self.state.after_step()
