"""Reading sequences that share a prompt: the reward model's side of the engine.

`read` takes whole sequences of token ids and returns the hidden state at the end of each. The
prompt is computed once. With `keep`, what was read stays in a KV cache under the sequence's key,
and the next `read` computes only what is new: the longest common prefix of the old and the new ids
is kept, whatever was read behind it (a turn's end, a token that merged with its neighbour) is
dropped; a turn's end, whose length is known, as soon as it has been read. Packed without padding: a
sequence's result does not depend on the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.decoder import prefill, prompt_chunk
from engine.kv_cache import PagedKV
from engine.memory import Chunk
from engine.model import Transformer
from engine.ops import Ops
from engine.packing import pack

logger = logging.getLogger(__name__)

KEYS_PER_TOKEN = 8  # a gathered key and value take about an eighth of a new token's workspace
Key = Hashable
# Called for each chunk with (hidden [tokens, hidden], token ids [tokens], its items).
OnChunk = Callable[[torch.Tensor, torch.Tensor, "Sequence[Item]"], None]


@dataclass(slots=True)
class Item:
    """One sequence of a `read`: its ids after the prompt, of which `past` are already cached."""

    key: Key
    ids: np.ndarray
    past: int
    order: int  # place in the result
    kept: bool = False  # has a row of the cache

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.past


class Reader:
    """Reads with one model; one prompt at a time."""

    def __init__(
        self,
        model: Transformer,
        ops: Ops,
        cache: PagedKV,
        *,
        keep: bool,
        chunk_tokens: int,
        end_tokens: int = 0,  # of each sequence, that will not be there when it has grown
    ) -> None:
        self.model, self.ops, self.cache, self.keep = model, ops, cache, keep
        self.end_tokens = end_tokens
        self.chunk = Chunk("tokens of the reward model", chunk_tokens)
        self.prompt_chunk = prompt_chunk()
        self.tokens_read = 0
        self._prompt = np.zeros(0, dtype=np.int64)
        self._rows: list[Key] = []  # row i of the cache belongs to _rows[i]
        self._ids: dict[Key, np.ndarray] = {}  # what is cached of each, after the prompt

    @torch.inference_mode()
    def begin(self, prompt_ids: Sequence[int]) -> torch.Tensor:
        """Forget everything, compute the shared prompt, return its hidden states `[prompt, h]`."""
        if not len(prompt_ids):
            raise ValueError("the shared prompt has no tokens")
        self.forget()
        self.cache.prompt_len = 0
        self._prompt = np.asarray(prompt_ids, dtype=np.int64)
        hidden = prefill(self.model, self.ops, self.cache, self._prompt, self.prompt_chunk)
        self.tokens_read += len(self._prompt)
        return hidden

    @torch.inference_mode()
    def read(
        self, sequences: Mapping[Key, np.ndarray], on_chunk: OnChunk | None = None
    ) -> torch.Tensor:
        """The hidden state at the last token of each sequence, `[sequences, hidden]`.

        A sequence is the whole of it, prompt included. Where one does not begin with the prompt
        (its tokenizer merged across the border) the shared prompt is shortened for all.
        """
        self._share(sequences)
        prompt_len = self.cache.prompt_len
        items = [
            self._item(i, key, ids[prompt_len:]) for i, (key, ids) in enumerate(sequences.items())
        ]
        if self.keep:
            self._make_rows(items)
        out = torch.empty(
            (len(items), self.model.config.hidden_size),
            dtype=self.model.dtype,
            device=self.model.device,
        )
        # Those without a row apart, then by length: a chunk's workspace is known before.
        pending = sorted(items, key=lambda item: (item.kept, item.num_new, item.order))
        wanted = sum(map(self._cost, pending))
        while pending:
            batch = self._read_next(pending, wanted, out, on_chunk)
            pending = pending[len(batch) :]
            wanted -= sum(map(self._cost, batch))
            self.tokens_read += sum(item.num_new for item in batch)
        return out

    def keep_only(self, keys: Sequence[Key]) -> None:
        """Free what was cached of all other sequences."""
        wanted = set(keys)
        rows = [row for row, key in enumerate(self._rows) if key in wanted]
        if len(rows) < len(self._rows):
            self.cache.select(rows)
            self._rows = [self._rows[row] for row in rows]
            self._ids = {key: self._ids[key] for key in self._rows}

    def fork(self, parents: Sequence[Key], children: Sequence[Key]) -> None:
        """What is cached of each parent is shared with its child from here on.

        Children that the cache has no room for are read from their start later.
        """
        known = [(p, c) for p, c in zip(parents, children, strict=True) if p in self._ids]
        room = min(self.cache.num_free_pages, len(self.cache.table) - len(self._rows))
        known = known[:room]
        if not known:
            return
        row_of = {key: row for row, key in enumerate(self._rows)}
        self.cache.select([*range(len(self._rows)), *(row_of[parent] for parent, _ in known)])
        for parent, child in known:
            self._rows.append(child)
            self._ids[child] = self._ids[parent]

    def forget(self) -> None:
        """Free all rows; the prompt stays."""
        self.cache.select([])
        self._rows, self._ids = [], {}

    def _share(self, sequences: Mapping[Key, np.ndarray]) -> None:
        """Shorten the shared prompt to what all sequences begin with."""
        prompt = self._prompt[: self.cache.prompt_len]
        shared = len(prompt)
        for ids in sequences.values():  # one token at least is left to read
            shared = min(shared, common_prefix(prompt, ids), len(ids) - 1)
        if shared < len(prompt):
            self.forget()
            self.cache.prompt_len = shared

    def _item(self, order: int, key: Key, ids: np.ndarray) -> Item:
        past = 0
        if key in self._ids:
            past = min(common_prefix(self._ids[key], ids), len(ids) - 1)  # the last one is read
        return Item(key, np.asarray(ids, dtype=np.int64), past, order)

    def _make_rows(self, items: list[Item]) -> None:
        """A cache row for each item that fits, cut back to what is common with the new ids."""
        past = {item.key: item.past for item in items}
        lengths = zip(self._rows, self.cache.lengths, strict=True)
        self.cache.truncate(np.asarray([past.get(key, n) for key, n in lengths], dtype=np.int64))
        for key, length in zip(self._rows, self.cache.lengths.tolist(), strict=True):
            self._ids[key] = self._ids[key][:length]
        for item in items:
            item.past = len(self._ids.get(item.key, ()))
        loose = self._without_room(items)
        if loose:
            logger.info("reward cache full: %d candidates are read from their start", len(loose))
            self.keep_only([key for key in self._rows if key not in loose])
        new_keys = [i.key for i in items if i.key not in self._ids and i.key not in loose]
        self.cache.add_rows(len(new_keys))
        self._rows += new_keys
        for item in items:
            item.kept = item.key not in loose
            item.past = item.past if item.kept else 0
            if item.kept:
                self._ids[item.key] = item.ids[: item.past]

    def _without_room(self, items: list[Item]) -> set[Key]:
        """The items, from the last one, whose new tokens would not fit in the pool."""
        own = np.asarray([len(item.ids) for item in items])
        stays = self.cache.pages_of(np.asarray([self._lasting(item) for item in items]))
        have = self.cache.pages_of(np.asarray([item.past for item in items]))
        ends = np.maximum.accumulate(self.cache.pages_of(own) - stays)  # of one item at a time
        fits = np.cumsum(stays - have) + ends <= self.cache.num_free_pages
        fits &= own <= self.cache.max_row_tokens
        num_new_rows = np.cumsum([item.key not in self._ids for item in items])
        fits &= num_new_rows + len(self._rows) <= len(self.cache.table)
        return {item.key for item, ok in zip(items, fits, strict=True) if not ok}

    def _read_next(
        self, pending: list[Item], wanted: int, out: torch.Tensor, on_chunk: OnChunk | None
    ) -> list[Item]:
        """Read as many of the pending, who cost `wanted`, as a chunk holds; returns them."""
        batch: list[Item] = []

        def forward() -> None:
            batch[:] = self._next_batch(pending)
            self._read_batch(batch, out, on_chunk)

        self.chunk.retrying(forward, wanted)
        return batch

    def _cost(self, item: Item) -> int:
        """The item's share of a chunk, in new tokens."""
        return item.num_new + (self.cache.prompt_len + len(item.ids)) // KEYS_PER_TOKEN

    def _next_batch(self, pending: list[Item]) -> list[Item]:
        """As many of the pending as the chunk holds, at least one."""
        total, pages, count = 0, 0, 0
        for item in pending:
            total += self._cost(item)
            pages += self._pages(item) if item.kept else 0
            full = total > self.chunk.size or pages > self.cache.num_free_pages
            if count and (full or item.kept != pending[0].kept):
                break
            count += 1
        return pending[:count]

    def _pages(self, item: Item) -> int:
        """What the cache needs while the item is read."""
        size = self.cache.page_size
        return -(-len(item.ids) // size) - -(-item.past // size)

    def _lasting(self, item: Item) -> int:
        """The tokens that stay in the cache behind this read."""
        return max(item.past, len(item.ids) - self.end_tokens)

    def _read_batch(self, batch: list[Item], out: torch.Tensor, on_chunk: OnChunk | None) -> None:
        new_lens = [item.num_new for item in batch]
        rows = self._grow(batch) if batch[0].kept else None
        tokens = np.concatenate([item.ids[item.past :] for item in batch])
        tokens = torch.from_numpy(tokens).to(self.model.device)
        hidden = self.model.extend(self.ops, tokens, pack(self.cache, new_lens, rows=rows))
        ends = torch.from_numpy(np.cumsum(new_lens) - 1).to(self.model.device)
        order = torch.tensor([item.order for item in batch], device=self.model.device)
        out[order] = hidden[ends]
        if rows is not None and self.end_tokens:
            self._take_back_ends(batch, rows)
        if on_chunk:
            on_chunk(hidden, tokens, batch)

    def _grow(self, batch: list[Item]) -> list[int]:
        """Room in the cache for the batch's new tokens; returns their rows."""
        row_of = {key: row for row, key in enumerate(self._rows)}
        rows = [row_of[item.key] for item in batch]
        lengths = self.cache.lengths.copy()
        lengths[rows] = [len(item.ids) for item in batch]
        self.cache.grow(lengths)
        for item in batch:
            self._ids[item.key] = item.ids
        return rows

    def _take_back_ends(self, batch: list[Item], rows: list[int]) -> None:
        lengths = [self._lasting(item) for item in batch]
        self.cache.take_back(np.asarray(rows), np.asarray(lengths))
        for item, length in zip(batch, lengths, strict=True):
            self._ids[item.key] = item.ids[:length]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n
