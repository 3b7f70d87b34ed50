"""Keys and values: the shared prompt once, and each row's own suffix in pages.

Rows own pages through a table. Dropping, reordering and forking rows is one operation, `select`:
it changes the table, and copies nothing but the last, partly filled page of a fork. Invariant: a
page is free, or its reference count is the number of table entries that name it.

Who owns what after rows a, b, c of 5 tokens (page size 4), then `select([2, 0, 0])`:

    before   a: 1 4      b: 2 5      c: 3 6          free: 7 8 ...
    after    c: 3 6      a: 1 4      a': 1 5         free: 2 7 8 ...    (page 5 is a copy of 4)

Page 0 is never owned: rows that pad a batch point at it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.config import ModelConfig
from engine.memory import Chunk

PADDING_PAGE = 0


class OutOfPages(RuntimeError):
    """The rows' pages do not suffice; the caller planned wrongly."""


class PagedKV:
    """The KV memory of one model: a prompt buffer and a pool of pages.

    Shapes: pages `[layers, num_pages, kv_heads, page_size, head_dim]`, prompt
    `[layers, kv_heads, max_prompt, head_dim]`, table `[max_rows, max_pages_per_row]` int32.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_row_tokens: int,
        max_prompt: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads, dim = config.num_kv_heads, config.head_dim
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (config.num_layers, num_pages + 1, heads, page_size, dim)  # + the padding page
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        prompt_shape = (config.num_layers, heads, max_prompt, dim)
        self.prompt_k = torch.zeros(prompt_shape, dtype=dtype, device=device)
        self.prompt_v = torch.zeros(prompt_shape, dtype=dtype, device=device)
        self.prompt_len = 0
        max_pages = -(-max_row_tokens // page_size)
        self.table = torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device)
        self._table = np.zeros((max_rows, max_pages), dtype=np.int32)  # the host's copy
        self._refs = np.zeros(num_pages + 1, dtype=np.int64)
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)  # a stack, its top at the end
        self._num_free = num_pages
        self.lengths = np.zeros(0, dtype=np.int64)  # tokens of each row's suffix
        self.copying = Chunk("copied pages", max(1, num_pages))

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    @property
    def max_row_tokens(self) -> int:
        return self._table.shape[1] * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.k[:, 0].numel() * self.k.element_size()

    @property
    def used_bytes(self) -> int:
        return (self.num_pages - self._num_free) * self.page_bytes

    def clear(self) -> None:
        """Forget all rows and the prompt."""
        self.select([])
        self.prompt_len = 0

    def pages_of(self, lengths: np.ndarray) -> np.ndarray:
        """Pages that suffixes of these lengths occupy."""
        return -(-lengths // self.page_size)

    def add_rows(self, count: int) -> None:
        """Append `count` rows with an empty suffix."""
        if self.num_rows + count > len(self._table):
            raise OutOfPages(f"{self.num_rows + count} rows, room for {len(self._table)}")
        self.lengths = np.concatenate((self.lengths, np.zeros(count, dtype=np.int64)))

    def grow(self, new_lengths: np.ndarray | int) -> None:
        """Own pages up to `new_lengths` (one for each row, or one for all) and set the lengths.

        Raises OutOfPages, with nothing changed, where the pool is too small.
        """
        new_lengths = np.broadcast_to(np.asarray(new_lengths, np.int64), self.lengths.shape).copy()
        have, want = self.pages_of(self.lengths), self.pages_of(new_lengths)
        missing = int(np.maximum(want - have, 0).sum())
        if missing > self._num_free or want.max(initial=0) > self._table.shape[1]:
            raise OutOfPages(
                f"{missing} pages wanted, {self._num_free} free; longest row {want.max(initial=0)} "
                f"pages of {self._table.shape[1]}"
            )
        if missing:
            first, last = int(have.min()), int(want.max())
            new = _between(have - first, want - first, last - first)
            columns = self._table[: self.num_rows, first:last]
            columns[new] = self._take(missing)
            try:
                self._upload(first, last)
            except (RuntimeError, MemoryError):  # out of memory: the caller may try again
                self._release(columns[new])
                raise
        self.lengths = new_lengths

    def truncate(self, new_lengths: np.ndarray) -> None:
        """Shorten rows; pages past the new ends are freed.

        A row whose last page is partly filled and shared gets a copy of it, since it will write
        there; without a free page it is cut back to the page's start. See `lengths` afterwards.
        """
        self.take_back(np.arange(self.num_rows), new_lengths)
        self._part_last_pages()

    def take_back(self, rows: np.ndarray, new_lengths: np.ndarray) -> None:
        """Shorten these rows to lengths whose last page no other row shares."""
        have, want = self.pages_of(self.lengths[rows]), self.pages_of(new_lengths)
        last = int(have.max(initial=0))
        self._release(self._table[rows, :last][_between(want, have, last)])
        self.lengths[rows] = new_lengths

    def _part_last_pages(self) -> None:
        """Nobody shares a page that is still written to; the first of its owners keeps it."""
        partial = np.flatnonzero(self.lengths % self.page_size)
        columns = self.lengths[partial] // self.page_size
        pages = self._table[partial, columns]
        is_first = np.zeros(len(pages), dtype=bool)
        is_first[np.unique(pages, return_index=True)[1]] = True
        # A page may also be another row's whole page: then even its first partial owner moves.
        whole = self._owned(np.arange(self.num_rows), self.lengths // self.page_size)
        moving = partial[~is_first | np.isin(pages, whole)]
        fits = moving[: self._num_free]
        if len(fits):
            columns = self.lengths[fits] // self.page_size
            sources = self._table[fits, columns].copy()
            self._table[fits, columns] = self._copies(sources)
            self._release(sources)
            self._upload(int(columns.min()), int(columns.max()) + 1)
        stuck = moving[len(fits) :]
        if len(stuck):
            columns = self.lengths[stuck] // self.page_size
            self._release(self._table[stuck, columns])
            self.lengths[stuck] = columns * self.page_size

    def free_pages_keeping(self, rows: np.ndarray) -> np.ndarray:
        """`[len(rows)]`: pages that would be free if only the first 1, 2, ... of them stayed."""
        counts = self.pages_of(self.lengths[rows])
        pages, owners = self._owned(rows, counts), np.repeat(np.arange(len(rows)), counts)
        first_owner = np.full(self.num_pages + 1, -1)
        first_owner[pages[::-1]] = owners[::-1]  # of several entries for a page the last one stays
        own = np.bincount(first_owner[first_owner >= 0], minlength=len(rows))
        return self.num_pages - np.cumsum(own)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i of the new batch the old row `rows[i]`: drops, reorders and forks at once.

        A row named twice is forked: whole pages are shared, the last partial page is copied.
        Raises OutOfPages, with nothing changed, where there is no room for the forks. Memory that
        runs out on the way leaves rows of no use; without any row, all is as new again.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return self._reset()
        self._check_room(rows)
        old_lengths = self.lengths
        counts = np.bincount(rows, minlength=len(old_lengths))
        old_pages = self.pages_of(old_lengths)
        dropped = counts == 0
        self._release(self._owned(np.flatnonzero(dropped), old_pages[dropped]))
        width = int(old_pages.max(initial=0))
        table = self._table[rows, :width]
        is_fork = np.ones(len(rows), dtype=bool)
        is_fork[np.unique(rows, return_index=True)[1]] = False
        self.lengths = old_lengths[rows]
        self._table[: len(rows), :width] = table
        self._fork(np.flatnonzero(is_fork))
        self._upload(0, int(self.pages_of(self.lengths).max(initial=0)))
        # NOTE: padded rows of a batch write to the page they name, so stale rows must name none.
        self.table[len(rows) : len(old_lengths)] = PADDING_PAGE

    def _reset(self) -> None:
        self._refs[:] = 0
        self._free = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._num_free = self.num_pages
        self.table[:] = PADDING_PAGE
        self.lengths = np.zeros(0, dtype=np.int64)

    def scrub(self, rows: np.ndarray) -> None:
        """Zero the pages of rows that hold NaN: a masked key of weight 0 would still spread it.

        Pages that other rows share are theirs, and were sound when they were shared.
        """
        owned = self._owned(rows, self.pages_of(self.lengths[rows]))
        pages, counts = np.unique(owned, return_counts=True)
        index = torch.from_numpy(pages[counts == self._refs[pages]])
        index = index.to(self.k.device, torch.int64)
        for pool in (*self.k, *self.v):
            pool[index] = 0

    def _check_room(self, rows: np.ndarray) -> None:
        """Whether `select(rows)` has a table row for each and a page for each copy."""
        if len(rows) > len(self._table):
            raise OutOfPages(f"{len(rows)} rows, room for {len(self._table)}")
        kept, counts = np.unique(rows, return_counts=True)
        copies = int((counts - 1)[self.lengths[kept] % self.page_size > 0].sum())
        if copies > self._num_free and copies > self.free_pages_keeping(kept)[-1]:
            raise OutOfPages(f"{copies} pages wanted for forks, {self._num_free} free")

    def _fork(self, rows: np.ndarray) -> None:
        """Give forked rows a share of their whole pages and a copy of the partial one."""
        whole = self.lengths[rows] // self.page_size
        self._refs += np.bincount(self._owned(rows, whole), minlength=len(self._refs))
        partial = rows[self.lengths[rows] % self.page_size > 0]
        if not len(partial):
            return
        columns = self.lengths[partial] // self.page_size
        sources = self._table[partial, columns].copy()
        self._table[partial, columns] = self._copies(sources)

    def _copies(self, sources: np.ndarray) -> np.ndarray:
        """New pages with the content of these."""
        targets = self._take(len(sources))
        source_index = torch.from_numpy(sources).to(self.k.device, torch.int64)
        target_index = torch.from_numpy(targets).to(self.k.device, torch.int64)

        def copy() -> None:
            size = self.copying.size
            pairs = list(zip(target_index.split(size), source_index.split(size), strict=True))
            for pool in (*self.k, *self.v):  # a layer at a time: the workspace stays small
                for to, of in pairs:
                    pool[to] = pool[of]

        self.copying.retrying(copy, len(targets))
        return targets

    def _owned(self, rows: np.ndarray, num_pages: np.ndarray) -> np.ndarray:
        """The first `num_pages[i]` pages of each of `rows`, in one flat array."""
        last = int(num_pages.max(initial=0))
        return self._table[rows, :last][_between(np.zeros_like(num_pages), num_pages, last)]

    def _take(self, count: int) -> np.ndarray:
        if count > self._num_free:
            raise OutOfPages(f"{count} pages wanted, {self._num_free} free")
        pages = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._refs[pages] = 1
        return pages

    def _release(self, pages: np.ndarray) -> None:
        """Drop one reference to each page; those without any left are free again."""
        dropped = np.bincount(pages, minlength=len(self._refs))
        self._refs -= dropped
        freed = np.flatnonzero((dropped > 0) & (self._refs == 0))
        assert self._num_free + len(freed) <= self.num_pages, "a page was freed twice"
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def _upload(self, first: int, last: int) -> None:
        """Copy table columns `first` to `last` of the live rows to the device."""
        if last > first and self.num_rows:
            columns = torch.from_numpy(self._table[: self.num_rows, first:last].copy())
            self.table[: self.num_rows, first:last] = columns.to(self.table.device)

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Page and offset in the page of suffix `positions` of `rows`, both int64."""
        pages = self._table[rows, positions // self.page_size].astype(np.int64)
        return pages, positions % self.page_size


def _between(first: np.ndarray, last: np.ndarray, num_columns: int) -> np.ndarray:
    """`[rows, columns]`: True at the columns from `first[row]` on, before `last[row]`."""
    columns = np.arange(num_columns)
    return (first[:, None] <= columns) & (columns < last[:, None])
