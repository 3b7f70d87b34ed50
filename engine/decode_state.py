"""What one decode step reads and writes on the device; every tensor keeps its address.

Rows move in lockstep: there is one length and one step for all. `length` counts the suffix tokens
in the cache including the one being appended; `step` the answer tokens sampled so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kv_cache import PagedKV


@dataclass(slots=True)
class DecodeState:
    """R is the largest number of rows, B the most steps between two looks of the host."""

    cache: PagedKV
    tokens: torch.Tensor  # [R] int64: sampled, not yet appended
    candidates: torch.Tensor  # [R] int64: the rows' random streams
    history: torch.Tensor  # [B, R] int64: tokens sampled since the last look
    bad: torch.Tensor  # [R] bool: rows whose logits held no finite value
    prompt_len: torch.Tensor  # [] int32
    length: torch.Tensor  # [] int32
    step: torch.Tensor  # [] int32
    block_step: torch.Tensor  # [1] int64: row of `history` to write
    stream_key: torch.Tensor  # [2] int64: low and high word
    host_length: int = 0  # the host's copy of `length`, for backends that slice
    host_step: int = 0
    host_stream_key: int = 0

    @classmethod
    def allocate(cls, cache: PagedKV, max_rows: int, block: int) -> DecodeState:
        device = cache.table.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            cache=cache,
            tokens=zeros(max_rows),
            candidates=zeros(max_rows),
            history=zeros(block, max_rows),
            bad=zeros(max_rows, dtype=torch.bool),
            prompt_len=zeros(dtype=torch.int32),
            length=zeros(dtype=torch.int32),
            step=zeros(dtype=torch.int32),
            block_step=zeros(1),
            stream_key=zeros(2),
        )

    def begin(self, prompt_len: int, stream_key: int) -> None:
        """Set everything for a prompt of which no answer token has been sampled."""
        self.host_length = self.host_step = 0
        self.host_stream_key = stream_key
        self.prompt_len.fill_(prompt_len)
        self.length.zero_()
        self.step.zero_()
        self.bad.zero_()
        self.stream_key[0], self.stream_key[1] = stream_key & 0xFFFFFFFF, stream_key >> 32

    def advance(self) -> None:
        """One more token lies in the cache (called first in a step, on host and device)."""
        self.host_length += 1
        self.length += 1
