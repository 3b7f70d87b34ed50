"""`--alpha auto`: how much to drop, when to end, and runs that do both."""

from __future__ import annotations

import numpy as np
import pytest

from engine.alpha_rule import (
    DEFAULT_CORRELATION,
    LOSS,
    MOST,
    AutoAlpha,
    chance_to_pass,
    expected_end,
    fraction_to_drop,
    spearman,
)
from postprocess.stats import spearman as other_spearman


def test_spearman_is_the_rank_correlation():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 6, 15).astype(float), rng.integers(0, 6, 15).astype(float)
        assert spearman(a, b) == pytest.approx(other_spearman(a, b))
    assert spearman(np.ones(5), np.arange(5.0)) == 0.0


def test_better_correlation_drops_more():
    fractions = [fraction_to_drop(rho, 64, 0.1) for rho in (0.0, 0.2, 0.4, 0.6, 0.8)]
    assert fractions == sorted(fractions)
    assert fractions[0] == pytest.approx(0.1), "scores that say nothing: the loss itself"
    assert fractions[2] == pytest.approx(0.3771, abs=1e-4)  # Phi(0.4 2.1539 - 0.9165 1.2816)


def test_bounds():
    assert fraction_to_drop(0.99, 1000) == MOST
    assert fraction_to_drop(0.0, 2) == pytest.approx(LOSS)


@pytest.mark.parametrize("rho", [0.3, 0.6])
def test_the_best_row_is_lost_as_often_as_the_rule_accepts(rho):
    """Simulated: scores now and at the end jointly normal; the winner is dropped in 5 %."""
    rng = np.random.default_rng(1)
    n, lost, trials = 64, 0, 4000
    drop = round(fraction_to_drop(rho, n) * n)
    for _ in range(trials):
        end = rng.standard_normal(n)
        now = rho * end + np.sqrt(1 - rho**2) * rng.standard_normal(n)
        lost += int(np.argmax(end) in np.argsort(now)[:drop])
    assert 0.03 < lost / trials < 0.07


def test_first_round_uses_the_default():
    rule = AutoAlpha()
    values = {i: float(i) for i in range(64)}
    verdict = rule.decide(values, {}, 16, 200)
    assert verdict.correlation == DEFAULT_CORRELATION
    assert verdict.alpha == pytest.approx(fraction_to_drop(DEFAULT_CORRELATION, 64))
    assert not verdict.ends


def test_correlation_decays_with_the_stretches_that_are_left():
    """From 16 to 32 tokens ranks hardly change; at 128 two more doublings are left."""
    rng = np.random.default_rng(2)
    before = {i: float(v) for i, v in enumerate(rng.standard_normal(40))}
    now = {i: v + 0.5 * float(rng.standard_normal()) for i, v in before.items()}
    r = spearman(np.array(list(before.values())), np.array(list(now.values())))
    rule = AutoAlpha()
    rule.remember(before, 16)
    assert rule.decide(now, {}, 32, 128).correlation == pytest.approx(r**2)
    assert rule.decide(now, {}, 32, 64).correlation == pytest.approx(r)
    assert rule.decide(now, {}, 32, 1024).correlation < rule.decide(now, {}, 32, 64).correlation


def test_short_steps_may_lose_less():
    """Four rounds a doubling lose together what one round a doubling loses."""
    rule = AutoAlpha()
    assert rule.loss(16) == LOSS
    rule.remember({}, 64)
    assert rule.loss(128) == LOSS
    assert rule.loss(1000) == LOSS
    lengths = [64, 76, 90, 107, 128]
    spent = 0.0
    for before, now in zip(lengths, lengths[1:], strict=False):
        rule.remember({}, before)
        spent += rule.loss(now)
    assert spent == pytest.approx(LOSS)


def test_too_few_pairs_are_no_evidence():
    rule = AutoAlpha()
    rule.remember({i: float(i) for i in range(7)}, 16)
    assert rule.decide({i: float(i) for i in range(7)}, {}, 32, 64).correlation == 0.3


def test_nan_scores_are_left_out():
    rule = AutoAlpha()
    rule.remember({i: float(i) for i in range(10)} | {10: float("nan")}, 16)
    verdict = rule.decide({i: float(i) for i in range(10)} | {10: 1.0}, {}, 32, 64)
    assert verdict.correlation == pytest.approx(0.99)  # of ten pairs in the same order


def test_it_ends_when_nobody_is_expected_to_pass_the_best():
    rule = AutoAlpha()
    before = {i: i / 10 for i in range(10)}
    rule.remember(before, 32)
    now = {i: v + (0.05 if i % 2 else -0.05) for i, v in before.items()}
    assert rule.decide(now, {99: 3.0}, 64, 128).ends
    assert not rule.decide(now, {99: 0.9}, 64, 128).ends
    assert not rule.decide(now, {}, 64, 128).ends  # nothing to end with


def test_drift_counts():
    """All rise by 1 a stretch: a finished row 2 above them is not safe with 3 stretches left."""
    changes = np.full(10, 1.0) + np.linspace(-0.1, 0.1, 10)
    unfinished = {i: 0.0 for i in range(10)}
    assert chance_to_pass(2.0, unfinished, changes, 3.0) > 0.99
    assert chance_to_pass(2.0, unfinished, changes, 1.0) < 0.01


def test_constant_changes_do_not_divide_by_zero():
    assert chance_to_pass(1.0, {0: 0.5}, np.zeros(9), 2.0) == 0.0
    assert chance_to_pass(0.4, {0: 0.5}, np.zeros(9), 2.0) == 1.0


def test_expected_end():
    assert expected_end(64, 6400, 20, 2048) == 64 + 320
    assert expected_end(64, 6400, 0, 2048) == 2048
    assert expected_end(64, 6400, 20, 100) == 100


def test_a_run_records_what_it_did(search):
    made = search(alpha="auto", schedule="fixed:16", init_batch_size=32)
    cuts = [r for r in made["rounds"] if r["cutoff"] is not None]
    assert cuts[0]["correlation"] == DEFAULT_CORRELATION
    assert len({r["alpha"] for r in cuts}) > 1, "the fraction follows the prompt"
    for entry in cuts:
        assert 0 < entry["alpha"] <= MOST
    assert cuts[0]["kept"] == round((1 - cuts[0]["alpha"]) * 32)  # finished rows included


def test_an_early_end_keeps_the_best_finished_and_cuts_the_rest(search):
    """The scripted reward: a short answer scores 10 at once, all others stay near 0 for good."""
    made = search(
        alpha="auto", schedule="fixed:16", init_batch_size=32, reward="tests.search:short_is_best"
    )
    assert made["rounds"][-2]["ended_early"]
    assert made["rounds"][-2]["stop_length"] < 96
    assert max(t["score"] for t in made["trajectories"]) >= 10
    ended = {t["candidate"] for t in made["trajectories"]} | {
        r["candidate"] for r in made["rejected"]
    }
    assert ended == set(range(32))


def test_an_early_end_seldom_misses_a_better_answer():
    """Simulated: values walk by equal steps a doubling; ended at 64, looked at again at 256."""
    rng = np.random.default_rng(4)
    ended = missed = 0
    for _ in range(1500):
        at_32 = rng.standard_normal(24)
        at_64 = at_32 + 0.4 * rng.standard_normal(24)
        best = at_64.max() + rng.uniform(0, 2.5)
        rule = AutoAlpha()
        rule.remember(dict(enumerate(at_32.tolist())), 32)
        if rule.decide(dict(enumerate(at_64.tolist())), {99: best}, 64, 256).ends:
            ended += 1
            at_256 = at_64 + 0.4 * np.sqrt(2) * rng.standard_normal(24)
            missed += int(at_256.max() > best)
    assert ended > 200
    assert missed / ended < 0.05
