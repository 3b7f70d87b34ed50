"""The layout of packed sequences: who sits where, and which keys each may see.

`extend` computes new tokens of several sequences back to back. Each sees the shared prompt, its own
cached past, and its own new tokens up to itself. Where nothing is cached the new keys are used as
they come. Everything here is index arithmetic on the host, once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kv_cache import PagedKV


@dataclass(slots=True)
class Packing:
    """Index tensors of one extend; `total` new tokens in `len(new_lens)` sequences."""

    cache: PagedKV
    to_prompt: bool  # the new tokens go on with the shared prompt itself
    prompt_len: int  # prompt tokens that every sequence sees
    positions: torch.Tensor  # [total] int64: position of each new token
    cu_new: torch.Tensor  # [sequences + 1] int32: where each sequence's new tokens begin
    cu_keys: torch.Tensor  # [sequences + 1] int32: the same for its keys
    new_lens: list[int]
    key_lens: list[int]
    new_slots: tuple[torch.Tensor, torch.Tensor] | None  # (page, offset) of each new token
    past_slots: tuple[torch.Tensor, torch.Tensor] | None  # (page, offset) of each past token
    keys: torch.Tensor | None  # [total keys] int64 into prompt + past + new; None: new alone


def pack(
    cache: PagedKV,
    new_lens: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    to_prompt: bool = False,
) -> Packing:
    """Lay out sequences of `new_lens` tokens each.

    With `rows`, sequence i is appended to cache row `rows[i]`, whose length must already have been
    grown by `new_lens[i]`. With `to_prompt`, the one sequence goes on with the prompt. Otherwise
    nothing is stored.
    """
    new = np.asarray(new_lens, dtype=np.int64)
    prompt_len = cache.prompt_len
    row_index = None if rows is None else np.asarray(rows, dtype=np.int64)
    past = np.zeros_like(new) if row_index is None else cache.lengths[row_index] - new
    keys_lens = prompt_len + past + new
    device = cache.table.device

    def to_device(values: np.ndarray, dtype=torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    starts = prompt_len + past
    positions = _ranges(starts, new)
    new_slots = past_slots = None
    if row_index is not None:
        slots = cache.slots(np.repeat(row_index, new), positions - prompt_len)
        new_slots = tuple(to_device(index) for index in slots)
        if past.any():
            slots = cache.slots(np.repeat(row_index, past), _ranges(np.zeros_like(past), past))
            past_slots = tuple(to_device(index) for index in slots)
    return Packing(
        cache=cache,
        to_prompt=to_prompt,
        prompt_len=prompt_len,
        positions=to_device(positions),
        cu_new=to_device(np.concatenate(([0], np.cumsum(new))), torch.int32),
        cu_keys=to_device(np.concatenate(([0], np.cumsum(keys_lens))), torch.int32),
        new_lens=new.tolist(),
        key_lens=keys_lens.tolist(),
        new_slots=new_slots,
        past_slots=past_slots,
        keys=to_device(_key_index(prompt_len, past, new)) if prompt_len + past.sum() else None,
    )


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`starts[i], starts[i] + 1, ...` (`counts[i]` of them), for each i in turn."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within


def _key_index(prompt_len: int, past: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where each sequence's keys lie in the concatenation prompt | all past | all new."""
    first_past = prompt_len + np.cumsum(past) - past
    first_new = prompt_len + past.sum() + np.cumsum(new) - new
    starts = np.stack((np.zeros_like(past), first_past, first_new), axis=1)
    counts = np.stack((np.full_like(past, prompt_len), past, new), axis=1)
    return _ranges(starts.reshape(-1), counts.reshape(-1))
