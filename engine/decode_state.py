"""What one decode step reads and writes on the device; every tensor keeps its address.

Rows move in lockstep: there is one length and one step for all. `length` counts the suffix tokens
in the cache including the one being appended; `step` the answer tokens sampled so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kv_cache import PagedKV

NO_TOKEN = -1


@dataclass(slots=True)
class DecodeState:
    """R is the largest number of rows, B the most steps between two looks of the host."""

    cache: PagedKV
    tokens: torch.Tensor  # [R] int64: sampled, not yet appended
    next_tokens: torch.Tensor  # [R] int64: what the step under way samples
    candidates: torch.Tensor  # [R] int64: the rows' random streams
    history: torch.Tensor  # [R, B] int64: tokens sampled since the last look
    done: torch.Tensor  # [R] int32: tokens in `history` at the end, 0: it runs, < 0: it failed
    bad: torch.Tensor  # [R] bool: rows whose logits held no finite value, ended or not
    prompt_len: torch.Tensor  # [] int32
    length: torch.Tensor  # [] int32
    step: torch.Tensor  # [] int32
    block_step: torch.Tensor  # [] int32: column of `history` to write
    stream_key: torch.Tensor  # [2] int32: low and high word
    stop_ids: torch.Tensor  # [S] int64, S a power of two: padded with NO_TOKEN
    host_length: int = 0  # the host's copy of `length`, for backends that slice
    host_step: int = 0
    host_block_step: int = 0
    host_stream_key: int = 0

    @classmethod
    def allocate(
        cls, cache: PagedKV, max_rows: int, block: int, stop_ids: Sequence[int] = ()
    ) -> DecodeState:
        device = cache.table.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            cache=cache,
            tokens=zeros(max_rows),
            next_tokens=zeros(max_rows),
            candidates=zeros(max_rows),
            history=zeros(max_rows, block),
            done=zeros(max_rows, dtype=torch.int32),
            bad=zeros(max_rows, dtype=torch.bool),
            prompt_len=zeros(dtype=torch.int32),
            length=zeros(dtype=torch.int32),
            step=zeros(dtype=torch.int32),
            block_step=zeros(dtype=torch.int32),
            stream_key=zeros(2, dtype=torch.int32),
            stop_ids=padded_ids(stop_ids).to(device),
        )

    def begin(self, prompt_len: int, stream_key: int) -> None:
        """Set everything for a prompt of which no answer token has been sampled."""
        self.host_length = self.host_step = self.host_block_step = 0
        self.host_stream_key = stream_key
        self.prompt_len.fill_(prompt_len)
        self.length.zero_()
        self.step.zero_()
        self.begin_block()
        words = np.array([stream_key & 0xFFFFFFFF, stream_key >> 32], dtype=np.uint32)
        self.stream_key.copy_(torch.from_numpy(words.view(np.int32)))

    def begin_block(self) -> None:
        """The host has looked: the history starts anew."""
        self.host_block_step = 0
        self.block_step.zero_()
        self.done.zero_()
        self.bad.zero_()

    def before_step(self) -> None:
        """One more token lies in the cache."""
        self.length += 1

    def after_step(self) -> None:
        """What was sampled is what the next step appends."""
        self.tokens.copy_(self.next_tokens)
        self.step += 1
        self.block_step += 1

    def count_on_host(self) -> None:
        """The host's counters, where a step ran without the host's hand in it."""
        self.host_step += 1
        self.host_block_step += 1

    def changed_by_step(self) -> tuple[torch.Tensor, ...]:
        """The tensors that a step changes for good, to save and to restore around a rehearsal."""
        return (self.length, self.step, self.block_step, self.tokens, self.done, self.bad)


def padded_ids(ids: Sequence[int]) -> torch.Tensor:
    """Different ids as `[S]` int64, S a power of two (16 at the least), the rest NO_TOKEN."""
    found = sorted(set(ids))
    size = 1 << max(4, (len(found) - 1).bit_length())
    return torch.tensor(found + [NO_TOKEN] * (size - len(found)), dtype=torch.int64)
