"""Forks in freed memory: who descends from whom, whose tokens and pages are whose, who counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from engine.kv_cache import PagedKV
from engine.refill import parents_of_forks
from tests.harness import KEY, load, new_cache, new_decoder, new_reader, random_ids
from tests.search import run_search

REFILL = dict(refill=True, schedule="halving", min_tokens=8, init_batch_size=24)
PROMPT_IDS = [1, 40, 41, 42]


@pytest.fixture(scope="module")
def llama(tiny_models):
    return load(tiny_models / "tiny-llama")


@pytest.fixture(scope="module")
def refilled(tiny_models):
    return run_search(tiny_models, alpha=0.5, **REFILL)


def owners(made: dict) -> Counter:
    """In how many lists each candidate ended."""
    lists = (made["trajectories"], made["rejected"], made["failed_rows"])
    return Counter(entry["candidate"] for entries in lists for entry in entries)


def check_pages(cache: PagedKV) -> None:
    """Every reference is a table entry, free pages are nobody's, written pages are one row's."""
    used = -(-cache.lengths // cache.page_size)
    owned = [cache._table[row, :n] for row, n in enumerate(used)]
    counts = np.bincount(np.concatenate([*owned, [0]]), minlength=cache.num_pages + 1)
    counts[0] -= 1
    assert (cache._refs == counts).all()
    free = cache._free[: cache.num_free_pages]
    assert len(set(free.tolist())) == len(free) == cache.num_pages - (counts > 0).sum()
    assert (counts[free] == 0).all()
    for row in np.flatnonzero(cache.lengths % cache.page_size):
        assert counts[cache._table[row, cache.lengths[row] // cache.page_size]] == 1


# ---- the rule ----------------------------------------------------------------------------------


def test_forks_go_evenly_from_the_best_down():
    assert parents_of_forks([5, 2, 9], 5) == [5, 2, 9, 5, 2]
    assert parents_of_forks([5, 2, 9], 2) == [5, 2]
    assert parents_of_forks([5], 0) == []


# ---- a whole run -------------------------------------------------------------------------------


def test_every_candidate_ends_in_exactly_one_list(refilled):
    forks = sum(r.get("forks", 0) for r in refilled["rounds"])
    assert forks > 24
    assert owners(refilled) == Counter(range(24 + forks))


def test_rows_are_refilled_to_what_they_were(refilled):
    cuts = [r for r in refilled["rounds"] if r["cutoff"] is not None]
    assert all(r["forks"] for r in cuts), "half of the rows go, so there is always room"
    next_index = 24
    for entry, after in zip(cuts, cuts[1:], strict=False):
        survivors = [c for c in after["candidates"] if c < next_index]
        new = [c for c in after["candidates"] if c >= next_index]
        assert set(survivors) <= set(entry["candidates"])
        next_index += entry["forks"]
        assert new and max(new) < next_index
        finished_since = 24 - after["rows"]
        assert 0 <= finished_since < 12


def test_a_fork_begins_with_its_parents_tokens(tiny_models):
    """Rejected ones too: alpha is so small that nearly all finish, and ids tell the rest."""
    made = run_search(tiny_models, alpha=0.15, **REFILL)
    tokens = {t["candidate"]: t["token_ids"] for t in made["trajectories"]}
    forks = [t for t in made["trajectories"] if "parent" in t]
    known = [t for t in forks if t["parent"] in tokens]
    assert len(known) >= 5
    for t in known:
        n = t["fork_length"]
        assert 0 < n < t["num_tokens"]
        assert t["token_ids"][:n] == tokens[t["parent"]][:n]
        assert t["token_ids"] != tokens[t["parent"]]
    next_token = [(t["token_ids"][t["fork_length"]], tokens[t["parent"]][t["fork_length"] :][:1])
                  for t in known]  # fmt: skip
    assert any([mine] != theirs for mine, theirs in next_token), "a stream of its own at once"


def test_only_new_tokens_are_counted(refilled):
    born = {t["candidate"]: t.get("fork_length", 0) for t in refilled["trajectories"]}
    lengths = {t["candidate"]: t["num_tokens"] for t in refilled["trajectories"]}
    at_fork = fork_lengths(refilled)
    for entry in refilled["rejected"]:
        lengths[entry["candidate"]] = entry["length"]
        born[entry["candidate"]] = at_fork.get(entry["candidate"], 0)
    assert refilled["tokens_generated"] == sum(lengths[c] - born[c] for c in lengths)
    assert refilled["tokens_generated"] == sum(r["tokens_generated"] for r in refilled["rounds"])
    assert refilled["tokens_scored"] == sum(r["tokens_scored"] for r in refilled["rounds"])


def fork_lengths(made: dict) -> dict[int, int]:
    """Candidates are numbered in the order of their birth, so rounds tell their fork length."""
    found, index = {}, 24
    for entry in made["rounds"]:
        for _ in range(entry.get("forks", 0)):
            found[index] = entry["stop_length"]
            index += 1
    return found


def test_texts_are_distinct(refilled):
    forks = {t["candidate"] for t in refilled["trajectories"] if "parent" in t}
    texts: dict[tuple, int] = {}
    for t in refilled["trajectories"]:
        first = texts.setdefault(tuple(t["token_ids"]), t["candidate"])
        assert first == t["candidate"] or not {first, t["candidate"]} & forks


def test_greedy_forks_repeat_their_parents_and_are_one_candidate(search):
    greedy = {**REFILL, "init_batch_size": 8, "temperature": 0.0, "ignore_stop": True}
    made = search(alpha=0.5, **greedy)
    assert len({tuple(t["token_ids"]) for t in made["trajectories"]}) == 1
    repeats = [r for r in made["rejected"] if "duplicate_of" in r]
    assert repeats
    assert all(r["duplicate_of"] < r["candidate"] for r in repeats)
    assert not any("parent" in t for t in made["trajectories"])
    assert owners(made) == Counter(range(8 + sum(r.get("forks", 0) for r in made["rounds"])))


def test_a_rerun_is_the_same_run(search, refilled):
    again = search(alpha=0.5, **REFILL)
    for key in ("trajectories", "rejected", "tokens_generated", "tokens_scored"):
        assert again[key] == refilled[key]


def test_scores_are_those_of_the_whole_text_read_from_its_start(search, refilled):
    """The reward model's cache was forked, cut back and written to along the way."""
    without = search(alpha=0.5, **REFILL, reward_cache="off")
    scores = {t["candidate"]: t["score"] for t in without["trajectories"]}
    assert scores == pytest.approx({t["candidate"]: t["score"] for t in refilled["trajectories"]},
                                   abs=1e-4)  # fmt: skip
    assert without["tokens_scored"] > refilled["tokens_scored"]


def test_self_reward_forks_its_sums(search):
    """A fork's perplexity goes on from its parent's; read from the start it is the same."""
    kept = search(alpha=0.5, reward="tiny-llama", reward_cache="on", **REFILL)
    again = search(alpha=0.5, reward="tiny-llama", reward_cache="off", **REFILL)
    assert any("parent" in t for t in kept["trajectories"])
    scores = {t["candidate"]: t["score"] for t in again["trajectories"]}
    assert scores == pytest.approx({t["candidate"]: t["score"] for t in kept["trajectories"]},
                                   rel=1e-4)  # fmt: skip


def test_a_function_scores_forks_too(search):
    made = search(alpha=0.5, reward="tests.search:short_is_best", **REFILL)
    assert owners(made) == Counter(range(24 + sum(r.get("forks", 0) for r in made["rounds"])))
    assert made["tokens_scored"] == 0


def test_memory_bounds_the_forks(search):
    """50 pages of 32 tokens: enough for 24 rows of 64 tokens, not of 96."""
    made = search(alpha=0.5, **REFILL, kv_pages=50, ignore_stop=True)
    page_bytes = made["rounds"][0]["kv_bytes"] // 24
    assert max(r["kv_bytes"] for r in made["rounds"]) <= 50 * page_bytes
    # At 64: 12 survivors hold 2 pages each, the last not full. Growing to 96 takes a page a row,
    # and each fork a copy: 24 + 12 + 2 forks <= 50.
    assert [(r["stop_length"], r["forks"]) for r in made["rounds"][2:4]] == [(32, 12), (64, 7)]
    assert len(made["trajectories"]) == 19
    assert owners(made) == Counter(range(24 + 12 * 3 + 7))


def test_rows_can_taper(search):
    made = search(alpha=0.5, **REFILL, refill_to=0.5, ignore_stop=True)
    # 24 rows; 12 survive and no fork is needed; of 12 rows 6 survive, of 6 rows 3.
    assert [r["rows"] for r in made["rounds"]] == [24, 12, 6, 3, 2]
    assert not any(r.get("forks") for r in made["rounds"])
    made = search(alpha=0.75, **REFILL, refill_to=0.5, ignore_stop=True)
    # Rounds at 8 and 32 tokens: 6 of 24 survive and grow to 12, 3 of 12 to 6.
    assert [r.get("forks") for r in made["rounds"]] == [6, 3, None]


def test_refill_by_memory_alone(search):
    """The default schedule: full at 65 tokens; survivors' forks share what they have written."""
    made = search(alpha=0.5, refill=True, kv_pages=48, init_batch_size=24, ignore_stop=True)
    first = made["rounds"][0]
    assert (first["stop_length"], first["rows"]) == (65, 24)
    # 12 survivors hold 24 pages; each row needs one more, and a fork shares its parent's two.
    assert first["forks"] == 12
    assert len(made["trajectories"]) > 12


# ---- the decoder's and the reader's part -------------------------------------------------------


def test_forked_rows_decode_as_if_they_had_been_alone(llama):
    """A fork continues its parent's text with its own stream, whatever sits beside it."""
    decoder = new_decoder(llama, stop_ids=())
    decoder.start(PROMPT_IDS, KEY, range(6))
    decoder.run(64, stop_length=10)
    assert len(decoder.live) == 6, "a pause finishes nobody"
    parent = decoder.tokens_of(2).copy()
    decoder.select([2, 4, 2, 2], fork_indices=[100, 101])
    check_pages(decoder.cache)
    decoder.run(30)
    check_pages(decoder.cache)
    made = {c.index: c for c in decoder.take_finished()}
    assert set(made) == {2, 4, 100, 101}
    assert (made[100].parent, made[100].fork_length) == (2, 10)
    for index in (100, 101):
        assert made[index].tokens[:10].tolist() == parent.tolist()
        alone = continue_alone(llama, parent, index, 30)
        assert made[index].tokens.tolist() == alone


def continue_alone(llama, parent, index: int, length: int) -> list[int]:
    """Token by token from logits of the whole sequence."""
    from engine.sampler import SamplingParams, sample
    from tests.harness import logits_of

    tokens = parent.tolist()
    while len(tokens) < length:
        logits = logits_of(llama, [*PROMPT_IDS, *tokens])[-1:]
        candidates = torch.tensor([index])
        token, _ = sample(logits, SamplingParams(top_k=0), KEY, candidates, len(tokens))
        tokens.append(int(token))
    return tokens


def test_room_for_forks_is_what_grows(llama):
    """Pages of 4: after twelve tokens eleven lie in the cache, the last page is partly filled."""
    decoder = new_decoder(llama, stop_ids=(), num_pages=40, max_rows=16)
    decoder.start(PROMPT_IDS, KEY, range(8))
    decoder.run(64, stop_length=12)  # 8 rows x 3 pages, 16 free
    assert decoder.cache.num_free_pages == 16
    assert decoder.room_for_forks(1) == 16  # nobody grows into a new page: a copy each
    assert decoder.room_for_forks(4) == 4  # 8 rows need one page each; a fork one and a copy
    assert decoder.room_for_forks(64) == 0
    assert decoder.num_that_can_grow(range(8), 1) == 8
    assert decoder.num_that_can_grow(range(8), 9) == 8  # 5 pages each: all 40
    assert decoder.num_that_can_grow(range(8), 10) == 6  # 6 pages each
    decoder.select([*range(8), 0, 1, 2, 3], fork_indices=[8, 9, 10, 11])
    decoder.run(64, stop_length=16)
    assert len(decoder.live) == 12, "what room_for_forks promised"
    check_pages(decoder.cache)


def test_siblings_that_share_pages_are_counted_once(llama):
    decoder = new_decoder(llama, stop_ids=(), num_pages=16, max_rows=16)
    decoder.start(PROMPT_IDS, KEY, range(2))
    decoder.run(64, stop_length=17)  # 16 tokens in the cache: four whole pages each
    decoder.select([0, 1, 0, 0, 0], fork_indices=[2, 3, 4])
    assert decoder.cache.num_free_pages == 8
    assert decoder.num_that_can_grow([0, 2, 3, 4, 1], 4) == 5
    assert decoder.num_that_can_grow([0, 2, 3, 4, 1], 8) == 5 - 1  # 4 pages shared + 4 x 2 = 12


def test_a_row_cut_back_into_a_shared_page_gets_its_own():
    """The turn's end behind an answer spills into a page that forks share."""
    config = tiny_config()
    cache = new_cache(config, num_pages=12, page_size=4)
    cache.add_rows(1)
    cache.grow(8)
    fill(cache, 0, 8, 1.0)
    cache.select([0, 0, 0])
    cache.truncate(np.array([6, 6, 8]))
    check_pages(cache)
    assert cache.lengths.tolist() == [6, 6, 8]
    cache.grow(np.array([8, 8, 8]))
    fill(cache, 0, 2, 2.0, start=6)
    fill(cache, 1, 2, 3.0, start=6)
    assert [value(cache, row, 7) for row in range(3)] == [2.0, 3.0, 1.0]
    assert [value(cache, row, 5) for row in range(3)] == [1.0, 1.0, 1.0]


def test_without_a_free_page_it_is_cut_back_to_the_pages_start():
    cache = new_cache(tiny_config(), num_pages=2, page_size=4)
    cache.add_rows(1)
    cache.grow(8)
    cache.select([0, 0])
    cache.truncate(np.array([6, 8]))  # row 1 keeps the whole page, and none is free
    assert cache.lengths.tolist() == [4, 8]
    check_pages(cache)


def test_forked_reading_equals_reading_alone(llama):
    """Answers with a turn's end that is dropped again, forks of forks, several rounds."""
    end = [2, 13]
    rng = np.random.default_rng(0)
    reader, alone = new_reader(llama), new_reader(llama, keep=False)
    prompt = random_ids(9)
    reader.begin(prompt)
    alone.begin(prompt)
    answers = {i: random_ids(11, seed=i) for i in range(4)}
    next_key = 4
    for round_number in range(4):
        sequences = {i: np.array([*prompt, *a, *end]) for i, a in answers.items()}
        torch.testing.assert_close(reader.read(sequences), alone.read(sequences), atol=1e-4, rtol=0)
        check_pages(reader.cache)
        kept = sorted(answers)[round_number % 2 :: 2]
        answers = {i: answers[i] for i in kept}
        reader.keep_only(kept)
        children = list(range(next_key, next_key + 3))
        parents = [kept[n % len(kept)] for n in range(3)]
        next_key += 3
        reader.fork(parents, children)
        check_pages(reader.cache)
        answers |= {c: list(answers[p]) for p, c in zip(parents, children, strict=True)}
        answers = {i: [*a, *rng.integers(3, 200, 6).tolist()] for i, a in answers.items()}
    assert reader.tokens_read < alone.tokens_read / 1.5


def test_forks_without_room_are_read_from_their_start(llama):
    reader, alone = new_reader(llama, num_pages=12, page_size=4), new_reader(llama, keep=False)
    prompt = random_ids(5)
    reader.begin(prompt)
    alone.begin(prompt)
    sequences = {i: np.array([*prompt, *random_ids(22, seed=i)]) for i in range(2)}
    reader.read(sequences)
    reader.fork([0, 0, 1], [2, 3, 4])
    check_pages(reader.cache)
    forked = {2: sequences[0], 3: sequences[0], 4: sequences[1]}
    grown = {i: np.append(ids, [7, 8]) for i, ids in {**sequences, **forked}.items()}
    torch.testing.assert_close(reader.read(grown), alone.read(grown), atol=1e-4, rtol=0)


def tiny_config():
    from engine.config import ModelConfig

    raw = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=8, hidden_size=4,
        intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    return ModelConfig.from_dict(raw)


def fill(cache: PagedKV, row: int, count: int, number: float, start: int = 0) -> None:
    positions = np.arange(start, start + count)
    pages, offsets = cache.slots(np.full(count, row), positions)
    cache.k[:, pages, :, offsets] = number


def value(cache: PagedKV, row: int, position: int) -> float:
    (page,), (offset,) = cache.slots(np.array([row]), np.array([position]))
    return float(cache.k[0, page, 0, offset, 0])


def test_rounds_that_can_neither_cut_nor_fork_are_not_read(tiny_models):
    """Refilled to half of the rows each time, one row is left soon; it is read at its end alone."""
    made = run_search(tiny_models, refill=True, refill_to=0.5, schedule="fixed:4", alpha=0.5,
                      init_batch_size=8, max_gen_tokens=64)  # fmt: skip
    idle = [r for r in made["rounds"][:-1] if r["rows"] == r["kept"] and not r.get("forks")]
    assert not idle
    assert 2 <= len(made["rounds"]) < 10, "of sixteen stops"
