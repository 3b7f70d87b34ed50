"""Decoding in lockstep: keyed streams, ends, bad rows, full memory and lost memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.candidates import End
from engine.decoder import Decoder
from engine.model import Transformer
from engine.ops import TorchOps
from engine.sampler import SamplingParams, sample
from engine.stepper import TorchSampler
from tests.harness import KEY, decode_all, load, logits_of, new_decoder, random_ids
from tests.tiny import make_tiny_llama

PROMPT = random_ids(13, seed=1)
LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load(folder)


@pytest.fixture(scope="module")
def texts(model: Transformer) -> dict[int, list[int]]:
    """64 candidates that nothing stops."""
    return decode_all(new_decoder(model, stop_ids=()), PROMPT, range(64), LENGTH)


# ---- keyed randomness ------------------------------------------------------------------------


def test_a_text_is_what_its_own_stream_draws_from_its_own_logits(model, texts) -> None:
    """CASES 12, 13: every token by its definition, one candidate at a time."""
    for index in (0, 7, 63):
        logits = logits_of(model, [*PROMPT, *texts[index]])[len(PROMPT) - 1 : -1]
        for step in range(LENGTH):
            row = logits[step : step + 1]
            token, _ = sample(row, SamplingParams(top_k=0), KEY, torch.tensor([index]), step)
            assert token.item() == texts[index][step]
    assert len({tuple(text) for text in texts.values()}) == 64


@pytest.mark.parametrize(
    "waves",
    [
        [range(8)],
        [range(0, 3), range(3, 6), range(6, 9)],
        [[7]],
        [[63, 7, 0, 31]],
    ],
)
def test_a_candidate_is_the_same_text_in_any_company(model, texts, waves) -> None:
    """CASES 12: at N = 8, at N = 64, in waves of 3, alone, in any order."""
    decoder = new_decoder(model, stop_ids=())
    decoder.start(PROMPT, KEY, waves[0])
    for number, wave in enumerate(waves):
        if number:
            decoder.start_more(wave)
        decoder.run(LENGTH)
        got = {c.index: c.tokens.tolist() for c in decoder.take_finished()}
        assert got == {index: texts[index] for index in wave}


def test_logits_do_not_depend_on_the_number_of_rows(model: Transformer) -> None:
    """In float32 on the CPU rows are bit for bit the same at 1 to 64 rows and in chunks."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for num_rows, chunk in ((64, 64), (64, 24), (16, 16), (9, 16), (8, 8), (3, 8), (1, 8)):
        decoder = new_decoder(model, stop_ids=())
        decoder.chunk.size = chunk
        recorder = Recorder(decoder)
        decode_all(decoder, PROMPT, range(num_rows), 6)
        for step, logits in enumerate(recorder.steps):
            for row in range(min(num_rows, 8)):
                expected = seen.setdefault((step, row), logits[row])
                assert torch.equal(logits[row], expected), f"{num_rows} rows, step {step}"


class Recorder:
    """Keeps the logits of each step, whole."""

    def __init__(self, decoder: Decoder) -> None:
        self.inner, self.steps = decoder.sampler, []
        decoder.sampler = decoder.stepper.sampler = self

    def __call__(self, logits: torch.Tensor, state: Any, rows: slice) -> None:
        if rows.start == 0:
            self.steps.append(logits.clone())
        else:
            self.steps[-1] = torch.cat((self.steps[-1], logits))
        self.inner(logits, state, rows)


def test_dropping_and_forking_others_changes_no_text(model, texts) -> None:
    decoder = new_decoder(model, stop_ids=())
    decoder.start(PROMPT, KEY, range(10))
    for length, keep, forks in (
        (3, [9, 7, 2, 0, 9], [100]),
        (8, [1, 4, 0, 0], [101]),
        (15, [0], []),
    ):
        while decoder.length < length:
            decoder._run_block(1)
        decoder.select(keep, fork_indices=forks)
    decoder.run(LENGTH)
    assert [c.index for c in decoder.finished] == [7]
    assert decoder.finished[0].tokens.tolist() == texts[7]


def test_looking_rarely_changes_no_text(model, texts) -> None:
    stops = sorted({texts[3][5], texts[9][11]})
    results = []
    for look_every in (1, 4, 16):
        decoder = new_decoder(model, stop_ids=stops, look_every=look_every)
        results.append((decode_all(decoder, PROMPT, range(32), LENGTH), decoder.tokens_generated))
    assert results[0] == results[1] == results[2]


def test_greedy_rows_are_all_alike(model) -> None:
    """CASES 11: temperature 0."""
    decoder = new_decoder(model, stop_ids=(), sampling=SamplingParams(temperature=0.0))
    rows = decode_all(decoder, PROMPT, range(5), LENGTH)
    assert len({tuple(text) for text in rows.values()}) == 1
    logits = logits_of(model, [*PROMPT, *rows[0]])[len(PROMPT) - 1 : -1]
    assert logits.argmax(1).tolist() == rows[0]


def test_first_tokens_are_independent_draws(model: Transformer) -> None:
    """CASES 9: a thousand candidates of two tokens, by a chi-square of one degree of freedom."""
    decoder = new_decoder(
        model, stop_ids=(), sampling=SamplingParams(top_k=2), max_rows=1000, num_pages=0
    )
    drawn = [ids[0] for ids in decode_all(decoder, PROMPT, range(1000), 1).values()]
    values, ids = logits_of(model, PROMPT)[-1].topk(2)
    expected = torch.softmax(values, 0) * 1000
    counts = torch.tensor([drawn.count(i) for i in ids.tolist()])
    assert counts.sum() == 1000 and counts.min() > 0
    assert float(((counts - expected) ** 2 / expected).sum()) < 10.83, "p < 0.001"


# ---- ends ------------------------------------------------------------------------------------


def test_any_stop_id_ends_a_text_and_nothing_is_counted_behind_it(model, texts) -> None:
    """CASES 8: several eos ids; the shortest prefix that ends in one of them."""
    stops = {texts[0][0], texts[3][5], texts[9][11], texts[20][-1]}
    decoder = new_decoder(model, stop_ids=sorted(stops), look_every=4)
    decoder.start(PROMPT, KEY, range(64))
    decoder.run(LENGTH)
    finished = {c.index: c for c in decoder.take_finished()}
    assert sorted(finished) == list(range(64))
    for index, text in texts.items():
        ends = [place for place, token in enumerate(text) if token in stops]
        expected = text[: ends[0] + 1] if ends else text
        candidate = finished[index]
        assert candidate.tokens.tolist() == expected
        assert candidate.end is (End.STOP if ends else End.LENGTH)
        assert candidate.answer.tolist() == (expected[:-1] if ends else expected)
    assert len({len(c.tokens) for c in finished.values()}) > 4, "they end at many lengths"
    assert decoder.tokens_generated == sum(len(c.tokens) for c in finished.values())


def test_ignore_stop_runs_to_the_length(model, texts) -> None:
    from tests.harness import new_cache

    cache = new_cache(model.config, num_pages=64, max_rows=8)
    sampler = TorchSampler(SamplingParams(top_k=0))
    decoder = Decoder(
        model, TorchOps(), cache, sampler, [texts[1][2]], max_rows=8, ignore_stop=True
    )
    assert decode_all(decoder, PROMPT, [1], LENGTH) == {1: texts[1]}


def test_finished_rows_free_their_pages_at_once(model, texts) -> None:
    stop = texts[5][9]
    decoder = new_decoder(model, stop_ids=[stop], page_size=4)
    decoder.start(PROMPT, KEY, range(64))
    used = []

    def on_look() -> None:
        pages = -(-(decoder.length - 1) // 4)
        assert decoder.cache.used_bytes == len(decoder.live) * pages * decoder.cache.page_bytes
        used.append(len(decoder.live))

    decoder.run(LENGTH, on_look)
    assert used[0] > used[-1] > 0
    assert decoder.cache.used_bytes == 0, "at the end all pages are free"


def test_full_memory_stops_the_rows_at_the_planned_length(model, texts) -> None:
    """Rows stop where another token of each would not fit, and go on where some are dropped."""
    decoder = new_decoder(model, stop_ids=(), num_pages=20, page_size=4, max_row_tokens=64)
    decoder.start(PROMPT, KEY, range(8))
    decoder.run(LENGTH)
    assert decoder.length == 2 * 4 + 1, "2 pages each, and the last token needs no place"
    assert decoder.steps_that_fit() == 0 and len(decoder.live) == 8
    decoder.run(LENGTH)
    assert decoder.length == 9, "nothing moves while nobody goes"
    decoder.select([7, 1, 5])
    assert decoder.steps_that_fit() == 4 * (20 // 3) - 8
    decoder.run(LENGTH)
    got = {c.index: c.tokens.tolist() for c in decoder.take_finished()}
    assert got == {index: texts[index] for index in (7, 1, 5)}


def test_a_stop_length_leaves_the_rows_unfinished(model, texts) -> None:
    decoder = new_decoder(model, stop_ids=(), look_every=4)
    decoder.start(PROMPT, KEY, range(3))
    decoder.run(LENGTH, stop_length=7)
    assert decoder.length == 7 and len(decoder.live) == 3 and not decoder.finished
    assert decoder.tokens_of(2).tolist() == texts[2][:7]
    assert decoder.tokens_generated == 21


def test_one_token_answers_need_no_cache(model, texts) -> None:
    decoder = new_decoder(model, stop_ids=(), num_pages=0)
    assert decode_all(decoder, PROMPT, range(4), 1) == {i: texts[i][:1] for i in range(4)}


def test_the_prompt_is_known_by_its_stream(model) -> None:
    decoder = new_decoder(model)
    assert not decoder.is_on(KEY)
    decoder.start(PROMPT, KEY, [0])
    assert decoder.is_on(KEY) and not decoder.is_on(KEY + 1)
    decoder.forget_prompt()
    assert not decoder.is_on(KEY) and decoder.tokens_generated == 0
    with pytest.raises(ValueError, match="no tokens"):
        decoder.start([], KEY, [0])


# ---- bad rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("look_every", [1, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_of_nan_are_named_and_dropped_and_the_others_finish(
    folder: Path, texts: dict[int, list[int]], look_every: int, value: float
) -> None:
    """CASES 10: an embedding that is no number poisons the rows that draw its token."""
    poison = texts[3][4]
    model = load(folder)
    assert poison not in PROMPT
    model.embed[poison] = value
    bad = {i for i, text in texts.items() if poison in text[:-1]}
    assert 3 in bad and len(bad) < 40
    decoder = new_decoder(model, stop_ids=(), look_every=look_every)
    for _ in range(2):  # the second time in pages that held NaN
        decoder.forget_prompt()
        decoder.start(PROMPT, KEY, range(64))
        decoder.run(LENGTH)
        finished = {c.index: c for c in decoder.take_finished()}
        assert {i for i, c in finished.items() if c.end is End.FAILED} == bad
        assert all(finished[i].tokens.tolist() == texts[i] for i in texts if i not in bad)


@pytest.mark.parametrize("look_every", [1, 4, 16])
def test_a_text_that_stopped_is_no_bad_row(folder, texts, look_every: int) -> None:
    """What a row computes behind its stop, until the host looks, is nobody's business."""
    stop, poison = texts[3][5], texts[3][6]
    model = load(folder)
    model.embed[poison] = float("nan")
    decoder = new_decoder(model, stop_ids=[stop], look_every=look_every)
    for _ in range(2):
        decoder.forget_prompt()
        decoder.start(PROMPT, KEY, range(64))
        decoder.run(LENGTH)
        for candidate in decoder.take_finished():
            text = texts[candidate.index]
            end = text.index(stop) + 1 if stop in text else LENGTH
            bad = text.index(poison) + 1 if poison in text[: end - 1] else LENGTH
            kind = End.STOP if stop in text[:end] else End.LENGTH
            assert candidate.end is (End.FAILED if bad < end else kind)
            assert candidate.tokens.tolist() == text[: min(bad, end)]


def test_a_row_of_minus_infinity_is_dropped_at_its_step(model, texts) -> None:
    """CASES 10: all -inf in one row of the logits."""

    class Silence:
        def __init__(self, inner: Callable[..., None]) -> None:
            self.inner = inner

        def __call__(self, logits: torch.Tensor, state: Any, rows: slice) -> None:
            silent = (state.candidates[rows] == 6) & (state.host_step == 5)
            self.inner(torch.where(silent[:, None], -torch.inf, logits), state, rows)

    decoder = new_decoder(model, stop_ids=())
    decoder.sampler = decoder.stepper.sampler = Silence(decoder.sampler)
    decoder.start(PROMPT, KEY, range(16))
    decoder.run(LENGTH)
    finished = {c.index: c for c in decoder.take_finished()}
    assert finished[6].end is End.FAILED
    assert finished[6].tokens.tolist() == texts[6][:5]
    assert decoder.tokens_generated == 5 + 15 * LENGTH
    assert all(finished[i].tokens.tolist() == texts[i] for i in range(16) if i != 6)


def test_a_prompt_of_nan_fails_every_row_and_spoils_nothing(folder, texts) -> None:
    model = load(folder)
    token = next(t for t in range(3, 259) if not any(t in x for x in texts.values()))
    model.embed[token] = float("nan")
    decoder = new_decoder(model, stop_ids=())
    decoder.start([*PROMPT, token], 1, range(4))
    decoder.run(LENGTH)
    assert [c.end for c in decoder.take_finished()] == [End.FAILED] * 4
    assert decode_all(decoder, PROMPT, range(4), LENGTH) == {i: texts[i] for i in range(4)}


# ---- lost memory -----------------------------------------------------------------------------


class SmallMemory(TorchOps):
    """Runs out of memory above so many rows of a decode step or tokens of a packed pass."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens, self.calls = rows, tokens, 0

    def _check(self, size: int, most: int) -> None:
        self.calls += 1
        if size > most and self.calls % 2 == 0:  # in the second layer
            raise torch.OutOfMemoryError("scripted")

    def decode_attention(self, model, layer, qkv, state, rows):
        out = super().decode_attention(model, layer, qkv, state, rows)
        self._check(len(qkv), self.rows)
        return out

    def packed_attention(self, model, layer, qkv, packing):
        out = super().packed_attention(model, layer, qkv, packing)
        self._check(len(qkv), self.tokens)
        return out


@pytest.mark.parametrize("most", [8, 16, 40])
def test_out_of_memory_in_decode_gives_the_same_texts(model, texts, most: int) -> None:
    """CASES 14: fewer rows at a time, the same N."""
    decoder = new_decoder(model, stop_ids=())
    decoder.ops = decoder.stepper.ops = SmallMemory(most, 999)
    assert decode_all(decoder, PROMPT, range(64), LENGTH) == texts
    assert decoder.chunk.num_splits == {8: 3, 16: 2, 40: 1}[most]


def test_out_of_memory_in_prefill_gives_the_same_texts(model, texts) -> None:
    """CASES 14."""
    decoder = new_decoder(model, stop_ids=())
    decoder.ops = decoder.stepper.ops = SmallMemory(8, 8)
    assert decode_all(decoder, PROMPT, range(8), LENGTH) == {i: texts[i] for i in range(8)}
    assert decoder.prompt_chunk.size == 6 and decoder.prompt_chunk.num_splits == 1


def test_out_of_memory_at_the_first_tokens_gives_the_same_texts(model, texts) -> None:
    """CASES 14: the first sampling goes over all rows at once."""
    decoder = new_decoder(model, stop_ids=())
    inner, failures = decoder.sampler, []

    def fails(logits: torch.Tensor, state: Any, rows: slice) -> None:
        if len(logits) > 16:
            failures.append(len(logits))
            raise torch.OutOfMemoryError("scripted")
        inner(logits, state, rows)

    decoder.sampler = decoder.stepper.sampler = fails
    assert decode_all(decoder, PROMPT, range(64), LENGTH) == texts
    assert failures == [64, 32]


def test_out_of_memory_without_remedy_is_raised(model) -> None:
    decoder = new_decoder(model, stop_ids=())
    decoder.ops = decoder.stepper.ops = SmallMemory(0, 0)
    with pytest.raises(torch.OutOfMemoryError):
        decode_all(decoder, PROMPT, range(20), LENGTH)


def test_more_rows_than_the_tables_hold_is_an_error(model) -> None:
    from engine.kv_cache import OutOfPages

    decoder = new_decoder(model, max_rows=8)
    with pytest.raises(OutOfPages, match="room for 8"):
        decoder.start(PROMPT, KEY, np.arange(9).tolist())
