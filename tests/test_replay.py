"""Replay says what a live run does: the same rounds, cuts, winner and token counts."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from postprocess import replay
from postprocess.pool import Pool, cost_at, curve, log_n_eq, sizes_up_to, subset_weights
from suite.settings import Settings
from tests.search import run_search

LENGTHS = "8,16,24,32,40,48,56,64,72,80,88"
NUM_CANDIDATES = 32
RULES = (
    dict(alpha=0.5, schedule="halving", min_tokens=8),
    dict(alpha=0.3, schedule="fixed:8"),
    dict(alpha=0.25, schedule="fixed:16", min_tokens=32),
    dict(alpha="auto", schedule="fixed:8", min_tokens=16),
)


@pytest.fixture(scope="module")
def archive(tiny_models, tmp_path_factory):
    """A Best-of-32 run folder of two prompts, with partial scores and hidden states."""
    return log_pool(tiny_models, tmp_path_factory.mktemp("logged") / "Bo32")


def log_pool(models, folder, prompts=("Why is the sky blue?", "Count to three."), **changes):
    from suite.files import dumps_strict, write_whole

    options = dict(batch_size=NUM_CANDIDATES, log_partial=LENGTHS, output_folder=str(folder))
    folder.mkdir()
    for number, prompt in enumerate(prompts):
        made = run_search(
            models, prompt=prompt, json_idx=number, **{"log_hidden": True, **options, **changes}
        )
        path = folder / f"tiny-llama_tiny-reward_prompt_{number:04d}.json"
        write_whole(path, dumps_strict([made], None))
    return folder


def logged_pools(archive, with_states=True):
    from postprocess.logged import logged_of
    from postprocess.runs import load_runs

    return list(logged_of(load_runs([archive]), with_states=with_states))


def arguments(*argv):
    return replay._parser().parse_args(["", *argv])


def replay_one(logged, rule, head=None, *argv):
    settings = Settings(speculative_rejection=True, init_batch_size=NUM_CANDIDATES, **rule)
    return replay.replay(logged, settings, head, arguments(*argv))


def assert_same(outcome, live):
    best = max(live["trajectories"], key=lambda t: t["score"])
    assert outcome.candidate == best["candidate"]
    assert outcome.score == pytest.approx(best["score"], abs=1e-5)
    assert outcome.tokens_generated == live["tokens_generated"]
    assert outcome.tokens_scored == live["tokens_scored"]
    assert outcome.num_rounds == len(live["rounds"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['alpha']}-{rule['schedule']}")
def test_replay_is_the_live_run(tiny_models, archive, rule):
    for logged in logged_pools(archive):
        live = run_search(
            tiny_models,
            prompt=logged.item["prompt"]["prompt"],
            json_idx=logged.json_idx,
            init_batch_size=NUM_CANDIDATES,
            **rule,
        )
        outcome = replay_one(logged, rule)
        assert outcome.num_approximated == 0
        assert_same(outcome, live)


def test_replay_is_the_live_run_when_memory_forces_the_stops(tiny_models, tmp_path):
    """Rows grow by pages of 32 tokens, so memory is full at 33, 65, ... tokens: all are logged."""
    pages = [33, 65, 97, 129, 161, 193]
    long = dict(max_tokens=400, max_gen_tokens=220, temperature=3.0)  # few stop early
    lengths = ",".join(map(str, pages))
    folder = log_pool(tiny_models, tmp_path / "Bo32", log_partial=lengths, log_hidden=False, **long)
    memory = arguments("--kv_tokens", str(48 * 32))
    forced = []
    for logged in logged_pools(folder, with_states=False):
        rule = dict(alpha=0.2, init_batch_size=24)
        live = run_search(
            tiny_models,
            prompt=logged.item["prompt"]["prompt"],
            json_idx=logged.json_idx,
            kv_pages=48,
            reward_cache="on",
            **rule,
            **long,
        )
        forced += [r["stop_length"] for r in live["rounds"] if r["cutoff"] is not None]
        settings = Settings(speculative_rejection=True, **rule)
        assert_same(replay.replay(logged, settings, None, memory), live)
    assert len(forced) >= 2 and set(forced) <= set(pages)


def test_replay_is_the_live_run_with_self_reward(tiny_models, tmp_path):
    """Perplexity reads no turn's end, and nothing twice."""
    own = dict(reward="tiny-llama", log_hidden=False)
    folder = log_pool(tiny_models, tmp_path / "Bo32", prompts=("Why?",), **own)
    (logged,) = logged_pools(folder, with_states=False)
    rule = dict(alpha=0.4, schedule="fixed:16")
    rows = dict(init_batch_size=NUM_CANDIDATES, reward_cache="on")
    live = run_search(tiny_models, prompt="Why?", json_idx=0, reward="tiny-llama", **rows, **rule)
    assert_same(replay_one(logged, rule), live)


def test_replay_with_a_value_head_is_the_live_run(tiny_models, archive, tmp_path):
    from rewards.value_head import ValueHead

    rng = np.random.default_rng(3)
    head = ValueHead(
        lengths=np.array([8, 64]),
        weights=rng.standard_normal((2, 33)),
        bias=np.zeros(2),
        provenance={"reward_model_name": "tiny-reward"},
    )
    rule = dict(alpha=0.5, schedule="halving", min_tokens=8)
    plain = [replay_one(logged, rule) for logged in logged_pools(archive)]
    for logged, without in zip(logged_pools(archive), plain, strict=True):
        live = run_search(
            tiny_models,
            prompt=logged.item["prompt"]["prompt"],
            json_idx=logged.json_idx,
            init_batch_size=NUM_CANDIDATES,
            head=head,
            **rule,
        )
        outcome = replay_one(logged, rule, head)
        assert_same(outcome, live)
        assert outcome.tokens_generated != without.tokens_generated, "a random head ranks otherwise"
        for entry in live["rounds"][:-1]:
            assert entry["values"] != entry["scores"]


def test_stops_that_were_not_logged_are_said_to_be(archive):
    (logged, _) = logged_pools(archive)
    outcome = replay_one(logged, dict(alpha=0.5, schedule="fixed:20"))
    # Rounds at 20 (16 stands in), 40, 60 (56) and 80.
    assert outcome.num_approximated > 0
    exact = replay_one(logged, dict(alpha=0.5, schedule="fixed:40"))
    assert exact.num_approximated == 0


# ---- the command -------------------------------------------------------------------------------


def test_the_command(archive, tmp_path, capsys):
    out = tmp_path / "replayed.jsonl"
    code = replay.main(
        [str(archive), "--alpha", "0.5", "auto", "--schedule", "halving", "fixed:8"]
        + ["--min_tokens", "8", "--init_batch_size", "16", "32", "--output", str(out)]
    )
    text = capsys.readouterr().out
    assert code == 0
    assert "8 rules on 2 pools" in text
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 8 * 2
    assert {line["JSON_idx" if "JSON_idx" in line else "json_idx"] for line in lines} == {0, 1}
    row = next(
        line for line in text.splitlines() if line.startswith("alpha 0.5, halving, from 8, 32")
    )
    mine = [x for x in lines if x["rule"] == "alpha 0.5, halving, from 8, 32 rows"]
    assert f"{np.mean([x['z'] for x in mine]):.3f}" in row


def test_forks_are_refused(archive, capsys):
    assert replay.main([str(archive), "--refill"]) == 2
    assert "fork" in capsys.readouterr().err


def test_runs_without_partial_scores_are_named(tiny_models, tmp_path, capsys, caplog):
    from suite.files import dumps_strict, write_whole

    folder = tmp_path / "Bo4"
    folder.mkdir()
    made = run_search(tiny_models, batch_size=4)
    path = folder / "tiny-llama_tiny-reward_prompt_0007.json"
    write_whole(path, dumps_strict([made], None))
    assert replay.main([str(folder)]) == 1
    assert "--log_partial" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad",
    [
        ["--alpha", "1"],
        ["--alpha", "x"],
        ["--schedule", "hourly"],
        ["--min_tokens", "-1"],
        ["--value_head", "nowhere"],
    ],
)
def test_bad_rules(archive, bad, capsys):
    assert replay.main([str(archive), *bad]) == 2
    assert "error:" in capsys.readouterr().err


def test_too_little_memory_for_a_row(archive, capsys):
    assert replay.main([str(archive), "--kv_tokens", "40"]) == 2
    assert "--kv_tokens 40" in capsys.readouterr().err


# ---- the log -----------------------------------------------------------------------------------


def test_partial_scores_are_those_of_unfinished_texts(tiny_models, archive):
    """At 16 tokens of a run that pauses there: the same scores, and the same hidden states."""
    (logged, _) = logged_pools(archive)
    live = run_search(
        tiny_models,
        prompt=logged.item["prompt"]["prompt"],
        json_idx=0,
        alpha=0.5,
        schedule="fixed:16",
        init_batch_size=NUM_CANDIDATES,
    )
    first = live["rounds"][0]
    assert first["stop_length"] == 16
    scores = dict(zip(first["candidates"], first["scores"], strict=True))
    assert logged.partial[16] == pytest.approx(scores, abs=1e-5)
    ended_before = set(range(NUM_CANDIDATES)) - set(scores)
    assert all(logged.num_tokens[i] <= 16 for i in ended_before)


def test_the_plot_of_partial_scores_shows_them(archive):
    from postprocess.plot_partial import collect
    from postprocess.runs import load_runs
    from postprocess.stats import spearman

    bins = collect(load_runs([archive]))
    expected = []
    for logged in logged_pools(archive):
        indices = sorted(logged.partial[8])
        early = np.array([logged.partial[8][i] for i in indices])
        expected.append(spearman(early, np.array([logged.score[i] for i in indices])))
    assert bins[3].correlations == pytest.approx(expected)


@pytest.mark.parametrize("bad", [[1], {"x": []}, {"8": [[0]]}, {"8": [["a", 1.0]]}, {"8": 3}])
def test_damaged_partial_scores_are_named(archive, bad, tmp_path, caplog):
    (path, *_) = sorted(archive.glob("*.json"))
    (item,) = json.loads(path.read_text())
    folder = tmp_path / "Bo32"
    folder.mkdir()
    (folder / path.name).write_text(json.dumps([{**item, "partials": bad}]))
    assert logged_pools(folder, with_states=False) == []
    assert "partial scores" in caplog.text


def test_reading_partial_texts_reads_only_new_tokens(archive):
    for logged in logged_pools(archive):
        pool = logged.pool
        texts = sum(len(found) for found in logged.partial.values())
        once = pool.prompt_tokens + int(pool.scored.sum())
        # Beyond reading each answer once: a turn's end behind each partial text.
        assert logged.item["tokens_scored"] <= once + texts * logged.end_tokens
        assert logged.item["tokens_scored"] >= once


# ---- the measure -------------------------------------------------------------------------------


def test_best_of_n_of_a_pool_is_the_mean_over_all_subsets():
    scores = np.array([3.0, 1.0, 4.0, 1.5, 9.0])
    for n in range(1, 6):
        weights = subset_weights(5, n)
        expected = np.mean([max(c) for c in itertools.combinations(scores, n)])
        assert weights @ np.sort(scores) == pytest.approx(expected)
        assert weights.sum() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="from 1 to"):
        subset_weights(5, 6)


def test_n_eq():
    assert math.exp(float(log_n_eq(0.0))) == pytest.approx(2.0)
    assert math.exp(float(log_n_eq(2.326348))) == pytest.approx(100.0, rel=1e-5)
    assert math.isfinite(float(log_n_eq(60.0)))


def test_pool_costs():
    pool = Pool(np.array([0.0, 2.0]), np.array([10, 30]), np.array([12, 32]), prompt_tokens=5)
    assert pool.cost_of(1) == (20.0, 5 + 22.0)
    assert pool.z(2.0) == pytest.approx(1.0)
    ((n, z, log_n, tokens),) = curve([pool], [2])
    assert (n, z, tokens) == (2, 1.0, 40 + 5 + 44)
    assert math.exp(log_n) == pytest.approx(1 / (1 - 0.8413447), rel=1e-5)
    assert Pool(np.zeros(3), np.ones(3), np.ones(3)).z(0.0) == 0.0  # equal scores


def test_sizes_and_interpolation():
    assert sizes_up_to(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    points = [(10.0, 1.0), (1000.0, 2.0)]
    assert cost_at(points, 1.5) == pytest.approx(100.0)
    assert cost_at(points, 2.0) == pytest.approx(1000.0)
    assert cost_at(points, 2.1) is None
