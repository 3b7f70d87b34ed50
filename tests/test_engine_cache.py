"""The KV cache's row map: against a dictionary model, and by the table of its docstring.

Every token written is a number of its own, so that contents show at once whose page was touched.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.candidates import End
from engine.config import ModelConfig, RopeConfig
from engine.kv_cache import PADDING_PAGE, OutOfPages, PagedKV
from engine.sampler import SamplingParams, sample
from tests.harness import KEY, load, logits_of, new_cache, new_decoder, random_ids
from tests.tiny import make_tiny_llama

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=4,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    norm_eps=1e-6,
    rope=RopeConfig(),
    max_positions=64,
)
PAGES, PAGE, ROWS, LONGEST = 12, 4, 6, 24


def small_cache() -> PagedKV:
    return new_cache(
        CONFIG, num_pages=PAGES, page_size=PAGE, max_rows=ROWS, max_row_tokens=LONGEST, max_prompt=1
    )


def write(cache: PagedKV, row: int, position: int, value: float) -> None:
    pages, offsets = cache.slots(np.asarray([row]), np.asarray([position]))
    cache.k[:, pages, :, offsets] = value
    cache.v[:, pages, :, offsets] = -value


def contents(cache: PagedKV) -> list[list[float]]:
    """What each row holds, through the device's table as a decode step reads it."""
    rows = []
    for row, length in enumerate(cache.lengths.tolist()):
        positions = torch.arange(length)
        pages = cache.table[row, positions // PAGE].long()
        keys = cache.k[:, pages, 0, positions % PAGE]
        values = cache.v[:, pages, 0, positions % PAGE]
        assert torch.equal(keys, -values) and torch.equal(keys[0], keys[1])
        rows.append(keys[0, :, 0].tolist())
    return rows


def check_ownership(cache: PagedKV) -> None:
    """A page is free, or its count is the number of rows that name it; none is written by two."""
    named: Counter[int] = Counter()
    written: Counter[int] = Counter()  # pages that the next token of a row goes to
    for row, length in enumerate(cache.lengths.tolist()):
        pages = cache.table[row, : -(-length // PAGE)].tolist()
        named.update(pages)
        if length % PAGE:
            written.update(pages[-1:])
    free = cache._free[: cache.num_free_pages].tolist()
    assert len(set(free)) == len(free), "a page is twice in the free list"
    assert not set(free) & set(named) and PADDING_PAGE not in {*free, *named}
    assert len(free) + len(named) == cache.num_pages, "a page was lost"
    refs = {page: count for page, count in enumerate(cache._refs.tolist()) if count}
    assert refs == dict(named)
    assert all(named[page] == 1 for page in written), "a page that is written to has two owners"
    assert cache.used_bytes == len(named) * cache.page_bytes
    assert (cache.table[cache.num_rows :] == PADDING_PAGE).all(), "a stale row names a page"


class CacheMachine(RuleBasedStateMachine):
    """Random sequences of all operations; the model is a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = small_cache()
        self.rows: list[list[float]] = []
        self.next_value = 1.0

    def _extend(self, row: int, count: int) -> None:
        for _ in range(count):
            write(self.cache, row, len(self.rows[row]), self.next_value)
            self.rows[row].append(self.next_value)
            self.next_value += 1

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(count=st.integers(1, 3))
    def add(self, count: int) -> None:
        count = min(count, ROWS - len(self.rows))
        self.cache.add_rows(count)
        self.rows += [[] for _ in range(count)]

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        steps = [data.draw(st.integers(0, 6)) for _ in self.rows]
        lengths = [len(row) + step for row, step in zip(self.rows, steps, strict=True)]
        have, want = ([-(-n // PAGE) for n in ns] for ns in (map(len, self.rows), lengths))
        wanted = sum(want) - sum(have)
        if wanted > self.cache.num_free_pages or max(lengths, default=0) > LONGEST:
            with pytest.raises(OutOfPages):
                self.cache.grow(np.asarray(lengths))
            return
        self.cache.grow(np.asarray(lengths))
        for row, step in enumerate(steps):
            self._extend(row, step)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), max_size=ROWS))
        forks = [row for row, times in Counter(chosen).items() for _ in range(times - 1)]
        copies = sum(len(self.rows[row]) % PAGE > 0 for row in forks)
        kept = np.unique(np.asarray(chosen, dtype=np.int64))
        free = [PAGES, *self.cache.free_pages_keeping(kept)]
        for count, number in enumerate(free):
            owned = [self.cache._table[r, : -(-len(self.rows[r]) // PAGE)] for r in kept[:count]]
            assert number == PAGES - len(set(np.concatenate(owned or [[]]).tolist()))
        if copies > free[-1]:
            with pytest.raises(OutOfPages):
                self.cache.select(chosen)
            return
        self.cache.select(chosen)
        self.rows = [list(self.rows[row]) for row in chosen]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        lengths = [data.draw(st.integers(0, len(row))) for row in self.rows]
        self.cache.truncate(np.asarray(lengths, dtype=np.int64))
        for row, (wished, got) in enumerate(zip(lengths, self.cache.lengths.tolist(), strict=True)):
            if got != wished:  # no page was left for a copy: cut to the page's start
                assert got == wished // PAGE * PAGE
            del self.rows[row][got:]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.rows = []

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert contents(self.cache) == self.rows

    @invariant()
    def owns_what_it_names(self) -> None:
        check_ownership(self.cache)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_the_table_of_the_docstring() -> None:
    cache = new_cache(CONFIG, num_pages=8, page_size=4, max_rows=4, max_row_tokens=8, max_prompt=1)
    cache.add_rows(3)
    cache.grow(4)
    cache.grow(5)
    assert cache.table[:3].tolist() == [[1, 4], [2, 5], [3, 6]]
    for row in range(3):
        for position in range(5):
            write(cache, row, position, 10 * row + position)
    cache.select([2, 0, 0])
    assert cache.table[:3].tolist() == [[3, 6], [1, 4], [1, 5]]
    assert sorted(cache._free[: cache.num_free_pages].tolist()) == [2, 7, 8]
    assert cache.lengths.tolist() == [5, 5, 5]
    assert contents(cache) == [[20, 21, 22, 23, 24], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    check_ownership(cache)


def test_cutting_back_into_a_shared_page_parts_it() -> None:
    """Two rows that share a page and are cut back into it must not write over each other."""
    cache = small_cache()
    cache.add_rows(1)
    cache.grow(PAGE)
    for position in range(PAGE):
        write(cache, 0, position, position)
    cache.select([0, 0])
    assert cache.table[0, 0] == cache.table[1, 0], "a whole page is shared"
    cache.truncate(np.asarray([2, 2]))
    cache.grow(3)
    write(cache, 0, 2, 100)
    write(cache, 1, 2, 200)
    assert contents(cache) == [[0, 1, 100], [0, 1, 200]]


@pytest.mark.parametrize("rows", [[0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 2]])
def test_a_fork_that_does_not_fit_changes_nothing(rows: list[int]) -> None:
    """No page is free for the copy, or there are more rows than the table has."""
    cache = small_cache()
    cache.add_rows(3)
    cache.grow(4 * PAGE - 1)
    assert cache.num_free_pages == 0
    for row in range(3):
        for position in range(4 * PAGE - 1):
            write(cache, row, position, 100 * row + position)
    before = contents(cache)
    with pytest.raises(OutOfPages):
        cache.select(rows)
    assert contents(cache) == before
    check_ownership(cache)


def test_too_many_rows_or_too_long_rows_are_refused() -> None:
    cache = small_cache()
    with pytest.raises(OutOfPages, match="room for 6"):
        cache.add_rows(ROWS + 1)
    cache.add_rows(1)
    with pytest.raises(OutOfPages, match="pages of 6"):
        cache.grow(LONGEST + 1)
    assert cache.lengths.tolist() == [0] and cache.num_free_pages == PAGES


def test_scrubbing_a_bad_row_leaves_pages_that_others_share() -> None:
    """CASES 10: the bad row's own pages lose their NaN; a sibling's text is untouched."""
    cache = small_cache()
    cache.add_rows(1)
    cache.grow(PAGE + 1)
    for position in range(PAGE + 1):
        write(cache, 0, position, 1 + position)
    cache.select([0, 0])
    write(cache, 1, PAGE, float("nan"))
    cache.scrub(np.asarray([1]))
    assert contents(cache) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]
    cache.scrub(np.asarray([0, 1]))
    assert contents(cache) == [[0] * 5, [0] * 5]


def test_decoding_goes_on_after_forks_drops_and_a_new_order(tmp_path) -> None:
    """Each token equals the one sampled from logits that were computed from the text's start."""
    model = load(make_tiny_llama(tmp_path))
    prompt = random_ids(11)
    decoder = new_decoder(model, stop_ids=(), max_rows=8, num_pages=40, max_row_tokens=32)
    decoder.start(prompt, KEY, range(4))
    for length, rows, forks in ((7, [3, 1, 1, 3], [10, 11]), (13, [2, 0, 3, 2, 2], [12, 13])):
        while decoder.length < length:
            decoder._run_block(1)
        before = [decoder.tokens_of(row).tolist() for row in rows]
        decoder.select(rows, fork_indices=forks)
        assert [decoder.tokens_of(row).tolist() for row in range(len(rows))] == before
        check_ownership(decoder.cache)
    parents = {c.index: (c.parent, c.fork_length) for c in decoder.live}
    assert parents == {10: (1, 7), 3: (None, None), 11: (3, 7), 12: (10, 13), 13: (10, 13)}
    decoder.run(20)
    finished = {c.index: c for c in decoder.take_finished()}
    assert all(c.end is End.LENGTH and c.num_tokens == 20 for c in finished.values())
    for index, candidate in finished.items():
        start = candidate.fork_length or 0
        logits = logits_of(model, [*prompt, *candidate.tokens])[len(prompt) - 1 : -1]
        for step in range(start, 20):
            stream = torch.tensor([index])
            token, _ = sample(logits[step : step + 1], SamplingParams(top_k=0), KEY, stream, step)
            assert token.item() == candidate.tokens[step]
    texts = [tuple(c.tokens.tolist()) for c in finished.values()]
    assert len(set(texts)) == len(texts), "forks go ways of their own"
