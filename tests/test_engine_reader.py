"""Incremental reading against reading from the start: rounds, drops, forks, merges, little room."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model import Transformer
from engine.reader import Reader, common_prefix
from engine.scoring import LikelihoodReader, mean_log_likelihood
from tests.harness import hidden_states, load, logits_of, new_reader, random_ids, reference
from tests.test_engine_decoder import SmallMemory
from tests.tiny import make_tiny_llama

PROMPT = random_ids(19, seed=2)
END = [2, 13]  # what a template puts behind an answer: read on top and dropped again
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load(folder)


def ids(*parts: list[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def check(reader: Reader, sequences: dict[int, np.ndarray]) -> None:
    """What the reader says of each equals its last hidden state, computed from its start."""
    got = reader.read(sequences)
    expected = [hidden_states(reader.model, sequence)[-1] for sequence in sequences.values()]
    assert (got - torch.stack(expected)).abs().max() < TOLERANCE


def answers(count: int, longest: int, seed: int = 0) -> dict[int, list[int]]:
    lengths = np.random.default_rng(seed).integers(1, longest, count)
    return {i: random_ids(int(n), seed=100 * seed + i) for i, n in enumerate(lengths)}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_chunks_of_any_size_read_the_same(model, keep: bool, chunk: int) -> None:
    """CASES 1, 2: no padding, so nothing depends on the others or on the batch."""
    reader = new_reader(model, keep=keep, chunk_tokens=chunk)
    hidden = reader.begin(PROMPT)
    assert (hidden - hidden_states(model, PROMPT)).abs().max() < TOLERANCE
    texts = answers(20, 30)
    check(reader, {i: ids(PROMPT, text, END) for i, text in texts.items()})
    read = sum(len(text) + len(END) for text in texts.values())
    assert reader.tokens_read == len(PROMPT) + read


@pytest.mark.parametrize("end_tokens", [0, len(END)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_five_rounds_with_drops_and_forks_read_only_what_is_new(
    model, page_size: int, end_tokens: int
) -> None:
    """The turn's end is read each round, everything else once; the counter is exact."""
    reader = new_reader(model, page_size=page_size, chunk_tokens=64, end_tokens=end_tokens)
    reader.begin(PROMPT)
    texts = {i: random_ids(5, seed=i) for i in range(12)}
    expected, unread = len(PROMPT), {i: 5 for i in texts}
    for round_ in range(5):
        before = reader.tokens_read
        check(reader, {i: ids(PROMPT, text, END) for i, text in texts.items()})
        expected += sum(n + len(END) for n in unread.values())
        assert reader.tokens_read - before <= sum(n + len(END) + page_size for n in unread.values())
        if page_size == 1:
            assert reader.tokens_read == expected
        dropped = sorted(texts)[:: 4 - round_ % 2]
        texts = {i: text for i, text in texts.items() if i not in dropped}
        reader.keep_only(list(texts))
        children = {100 * (round_ + 1) + i: i for i in list(texts)[:2]}
        reader.fork(list(children.values()), list(children))
        texts |= {child: list(texts[parent]) for child, parent in children.items()}
        unread = {}
        for i in texts:
            new = random_ids(3 + (i + round_) % 5, seed=1000 * round_ + i)
            texts[i] = texts[i] + new
            unread[i] = len(new)
    assert len(texts) > 5


def test_a_round_reads_exactly_the_new_tokens_and_the_turn_end(model) -> None:
    """A scripted run without forks, counted by hand."""
    reader = new_reader(model)
    reader.begin(PROMPT)
    first = {i: random_ids(6, seed=i) for i in range(4)}
    check(reader, {i: ids(PROMPT, text, END) for i, text in first.items()})
    assert reader.tokens_read == 19 + 4 * (6 + 2)
    reader.keep_only([3, 1])
    second = {i: first[i] + random_ids(10, seed=50 + i) for i in (1, 3)}
    check(reader, {i: ids(PROMPT, text, END) for i, text in second.items()})
    assert reader.tokens_read == 19 + 4 * 8 + 2 * (10 + 2)
    check(reader, {3: ids(PROMPT, second[3], END)})
    assert reader.tokens_read == 19 + 32 + 24 + 1, "nothing is new, so the last token alone"


def test_the_ends_of_turns_take_room_in_one_pass_alone(model) -> None:
    """Whole pages of answers, and a page more: what is read next waits for the end before it."""
    reader = new_reader(model, page_size=4, num_pages=12 * 4 + 1, end_tokens=len(END))
    reader.begin(PROMPT)
    for length in (8, 16):
        texts = {i: random_ids(length, seed=i) for i in range(12)}
        check(reader, {i: ids(PROMPT, text, END) for i, text in texts.items()})
        assert reader.cache.lengths.tolist() == [length] * 12
        assert reader.cache.used_bytes == 12 * length // 4 * reader.cache.page_bytes
    assert reader.tokens_read == len(PROMPT) + 12 * (16 + 2 * len(END))
    texts[12] = random_ids(8, seed=12)  # no room: read from its start, apart
    check(reader, {i: ids(PROMPT, text, END) for i, text in texts.items()})
    assert len(reader.cache.lengths) == 12


@pytest.mark.parametrize("keep", [True, False])
def test_a_token_that_merged_with_its_neighbour_is_read_again(model, keep: bool) -> None:
    """Another tokenizer: the last ids of the old text change when the text grows."""
    reader = new_reader(model, keep=keep)
    reader.begin(PROMPT)
    old = {0: [50, 51, 52], 1: [60, 61, 62, 63]}
    check(reader, {i: ids(PROMPT, text, END) for i, text in old.items()})
    before = reader.tokens_read
    new = {0: [50, 51, 152, 53], 1: [160, 62, 63]}
    check(reader, {i: ids(PROMPT, text, END) for i, text in new.items()})
    kept = {0: 2, 1: 0} if keep else {0: 0, 1: 0}
    assert reader.tokens_read - before == sum(len(new[i]) + 2 - kept[i] for i in new)


@pytest.mark.parametrize("first", [0, 10, 18])
def test_the_shared_prompt_is_shortened_where_a_text_leaves_it(model, first: int) -> None:
    """A tokenizer that merged across the border of prompt and answer."""
    reader = new_reader(model)
    reader.begin(PROMPT)
    check(reader, {7: ids(PROMPT, [9, 9])})
    other = list(PROMPT)
    other[first] = 77
    check(reader, {7: ids(PROMPT, [9, 9, 8]), 8: ids(other, [5])})
    assert reader.cache.prompt_len == first
    check(reader, {7: ids(PROMPT, [9, 9, 8, 4]), 8: ids(other, [5, 6])})
    reader.begin(PROMPT)
    assert reader.cache.prompt_len == len(PROMPT), "the next prompt is whole again"


def test_a_text_that_is_the_prompt_itself_is_read(model) -> None:
    """CASES 4: an empty answer with nothing behind it has a hidden state all the same."""
    reader = new_reader(model)
    reader.begin(PROMPT)
    check(reader, {0: ids(PROMPT), 1: ids(PROMPT, [4, 5])})
    check(reader, {0: ids(PROMPT, [3]), 1: ids(PROMPT, [4, 5, 6])})


@pytest.mark.parametrize(
    "room",
    [
        {"num_pages": 9},
        {"num_pages": 0},
        {"max_rows": 3},
        {"max_row_tokens": 12},
        {"max_rows": 0, "num_pages": 0, "max_row_tokens": 0},
    ],
    ids=str,
)
def test_what_the_cache_has_no_room_for_is_read_from_its_start(model, room, caplog) -> None:
    caplog.set_level(logging.INFO)
    reader = new_reader(model, page_size=4, chunk_tokens=50, **room)
    reader.begin(PROMPT)
    texts = {i: random_ids(4 + i, seed=i) for i in range(7)}
    for round_ in range(4):
        check(reader, {i: ids(PROMPT, text, END) for i, text in texts.items()})
        texts = {
            i: t + random_ids(3, seed=round_ + 10 * i) for i, t in texts.items() if i != round_
        }
        reader.keep_only(list(texts))
        reader.fork([5], [20 + round_])
        texts[20 + round_] = [*texts[5], 9]
    assert "reward cache full" in caplog.text
    assert reader.cache.used_bytes <= reader.cache.num_pages * reader.cache.page_bytes


@pytest.mark.parametrize("most", [8, 20, 60])
@pytest.mark.parametrize("keep", [True, False])
def test_out_of_memory_in_reading_changes_nothing(model, most: int, keep: bool) -> None:
    """CASES 14: the chunk is halved, what was read already is not read again."""
    reader = new_reader(model, keep=keep, chunk_tokens=128)
    reader.begin(PROMPT)
    reader.ops = SmallMemory(999, most)
    texts = {i: random_ids(4, seed=i) for i in range(16)}
    sequences = {i: ids(PROMPT, text) for i, text in texts.items()}
    check(reader, sequences)
    assert reader.tokens_read == len(PROMPT) + 16 * 4
    assert reader.chunk.num_splits >= 1 and reader.chunk.size < 128
    longer = {i: ids(sequence, [7, 8, 9]) for i, sequence in sequences.items()}
    check(reader, longer)
    assert reader.tokens_read == len(PROMPT) + 16 * (4 + (3 if keep else 7))


SCRIPT = st.lists(
    st.fixed_dictionaries(
        {
            "grow": st.lists(st.integers(0, 6), min_size=8, max_size=8),
            "recut": st.lists(st.integers(0, 4), min_size=8, max_size=8),
            "keep": st.lists(st.booleans(), min_size=8, max_size=8),
            "fork": st.lists(st.integers(0, 7), max_size=3),
            "skip": st.lists(st.booleans(), min_size=8, max_size=8),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(SCRIPT, st.sampled_from([4, 8]), st.sampled_from([6, 14, 200]), st.sampled_from([16, 500]))
def test_any_script_of_rounds_reads_right(model, script, page_size, num_pages, chunk) -> None:
    """Random growth, changed ends, drops, forks and candidates that are not read in a round."""
    reader = new_reader(
        model, page_size=page_size, num_pages=num_pages, max_rows=9, chunk_tokens=chunk
    )
    reader.begin(PROMPT)
    texts = {i: random_ids(4, seed=i) for i in range(5)}
    fresh = 100
    for number, round_ in enumerate(script):
        for place, i in enumerate(list(texts)):
            cut = len(texts[i]) - round_["recut"][place % 8]
            new = random_ids(round_["grow"][place % 8], seed=1000 * number + i)
            texts[i] = texts[i][: max(1, cut)] + new
        read = {i: t for n, (i, t) in enumerate(texts.items()) if not round_["skip"][n % 8]}
        check(reader, {i: ids(PROMPT, text, END) for i, text in read.items()}) if read else None
        texts = {i: t for n, (i, t) in enumerate(texts.items()) if round_["keep"][n % 8]}
        reader.keep_only(list(texts))
        parents = [list(texts)[n % len(texts)] for n in round_["fork"]] if texts else []
        reader.fork(parents, range(fresh, fresh + len(parents)))
        for parent in parents:
            texts[fresh] = list(texts[parent])
            fresh += 1


# ---- likelihoods -----------------------------------------------------------------------------


def log_likelihood(model: Transformer, sequence: np.ndarray) -> float:
    """Of all tokens but the first, from the whole sequence's logits."""
    logits = torch.log_softmax(logits_of(model, sequence).double(), dim=-1)
    targets = torch.from_numpy(sequence[1:])
    return float(logits[:-1].gather(1, targets[:, None]).sum())


@pytest.mark.parametrize("room", [{}, {"num_pages": 6}, {"max_rows": 2}, {"keep": False}], ids=str)
def test_likelihoods_of_growing_texts(model, room) -> None:
    likelihood = LikelihoodReader(new_reader(model, page_size=4, chunk_tokens=40, **room))
    likelihood.begin(PROMPT)
    texts: dict[int, list[int]] = {i: random_ids(i, seed=i) for i in range(6)}  # one is empty
    for round_ in range(5):
        sequences = {i: ids(PROMPT, text) for i, text in texts.items()}
        for (total, count), sequence in zip(
            likelihood.read(sequences), sequences.values(), strict=True
        ):
            assert count == len(sequence) - 1
            assert total == pytest.approx(log_likelihood(model, sequence), abs=1e-3)
        likelihood.reader.keep_only([i for i in texts if i != round_])
        texts.pop(round_, None)
        likelihood.fork([5], [10 + round_])
        texts[10 + round_] = list(texts[5])
        for i in texts:  # some do not grow
            texts[i] = texts[i] + random_ids((i + round_) % 3, seed=77 * round_ + i)


def test_a_round_of_likelihoods_reads_only_new_tokens(model) -> None:
    likelihood = LikelihoodReader(new_reader(model))
    likelihood.begin(PROMPT)
    first = {i: ids(PROMPT, random_ids(5, seed=i)) for i in range(3)}
    likelihood.read(first)
    assert likelihood.reader.tokens_read == 19 + 15
    second = {i: ids(sequence, [4] * i) for i, sequence in first.items()}
    likelihood.read(second)
    assert likelihood.reader.tokens_read == 19 + 15 + 0 + 1 + 2


@pytest.mark.parametrize("keep", [True, False])
def test_out_of_memory_counts_no_likelihood_twice(model, keep: bool, monkeypatch) -> None:
    """CASES 14: it can strike in the logits too, behind the reading."""
    import engine.scoring

    inner, calls = engine.scoring.token_log_likelihoods, []

    def fails(*args):
        calls.append(len(args[1]))
        if len(calls) in (2, 3, 6):
            raise torch.OutOfMemoryError("scripted")
        return inner(*args)

    monkeypatch.setattr(engine.scoring, "token_log_likelihoods", fails)
    likelihood = LikelihoodReader(new_reader(model, keep=keep, chunk_tokens=60))
    likelihood.begin(PROMPT)
    sequences = {i: ids(PROMPT, random_ids(7, seed=i)) for i in range(12)}
    for _ in range(2):
        for (total, _), sequence in zip(
            likelihood.read(sequences), sequences.values(), strict=True
        ):
            assert total == pytest.approx(log_likelihood(model, sequence), abs=1e-3)
        sequences = {i: ids(sequence, [8, 9]) for i, sequence in sequences.items()}
    assert likelihood.reader.chunk.num_splits == 3


def test_mean_log_likelihood_equals_the_loss_of_transformers(folder, model, monkeypatch) -> None:
    monkeypatch.setattr("engine.scoring.LOGIT_BYTES", 4 * 259 * 5)  # five tokens' logits at a time
    texts = [random_ids(n, seed=n) for n in (1, 9, 30)]
    got = mean_log_likelihood(model, PROMPT, texts)
    hf = reference(folder)
    for value, text in zip(got, texts, strict=True):
        whole = torch.tensor([PROMPT + text])
        with torch.inference_mode():
            assert value == pytest.approx(-hf(whole, labels=whole).loss.item(), abs=1e-4)


def test_common_prefix() -> None:
    a = np.asarray([1, 2, 3])
    assert common_prefix(a, a) == 3
    assert common_prefix(a, a[:2]) == 2 and common_prefix(a[:0], a) == 0
    assert common_prefix(a, np.asarray([1, 9, 3, 4])) == 1


def test_a_prompt_without_tokens_is_refused(model) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        new_reader(model).begin([])
