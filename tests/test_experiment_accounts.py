"""The experiment's plan and its two accounts, with numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import experiment_report
from benchmarks.experiment_accounts import ACCOUNTS, BestOfN, gain, searched
from benchmarks.experiment_plan import Size, groups, kv_bytes, tasks
from postprocess.stats import Bound
from suite.settings import Settings


def test_the_cache_question_compares_runs_of_one_seed():
    """Also where the first seed is another than 0."""
    size = Size(seeds=(3, 4))
    made = {c.name: c for group in groups(size, Settings(max_gen_tokens=1024)) for c in group}
    assert not [c for group in groups(Size(alphas=(0.3,)), Settings()) for c in group
                if "cache kept" in c.name], "nothing to compare with"  # fmt: skip
    again, main = made["alpha 0.5 cache kept"], made["alpha 0.5 seed 3"]
    assert again.blocks == main.blocks == (3,)
    assert (again.settings.reward_cache, main.settings.reward_cache) == ("on", "auto")


def test_memory_of_120_rows_of_the_default_model():
    """SmolLM2: 30 layers x 3 heads x 64 x (keys, values) x 2 bytes = 23,040 bytes a token; 1,023
    tokens have a place in the cache, 16 pages of 64."""
    from types import SimpleNamespace

    config = SimpleNamespace(kv_bytes_per_token=lambda value_bytes: 30 * 3 * 64 * 2 * value_bytes)
    assert kv_bytes(config, 2, 64, 120, 1024) == 120 * 16 * 64 * 23_040 == 2_831_155_200


def test_order_of_the_full_size():
    """Chunks of 25: the pools and the first seed come before anything else, timing second."""
    size = Size()
    assert size.shown_sizes == [120, 240, 480, 960, 1920, 3840]
    order = list(tasks(groups(size, Settings(max_gen_tokens=1024)), 100, size.chunk_prompts))
    assert len(order) == len({(place, config.name) for place, config in order})
    assert len(order) == 100 * (1 + 18) + 10 * (2 + 4) + 20 * 5 + 20 * 2
    assert {config.name for _, config in order[:250]} == {
        "pool", *(f"alpha {a / 10:g} seed 0" for a in range(1, 10))
    }  # fmt: skip
    assert max(place for place, _ in order[:250]) == 24
    assert order[250][1].name == "wave seed 0"
    assert max(place for place, _ in order[: 250 + 60 + 100 + 40 + 225]) == 24


def made_up(idx, best, cost):
    """Pool 0, 1, 2, 3 with 10 + 10 tokens each and 8 s; a wave of 2 takes 3 s; a run at `best`."""

    def line(config, generated, sec, **more):
        return {"JSON_idx": idx, "config": config, "tokens_generated": generated,
                "tokens_scored": generated, "generation_sec": sec / 2, "reward_sec": sec / 2,
                "num_completed": 2, **more}  # fmt: skip

    return {
        "pool": line("pool", 40, 8.0, scores=[2.0, 0.0, 3.0, 1.0]),
        "wave seed 0": line("wave seed 0", 20, 2.0),
        "wave seed 1": line("wave seed 1", 20, 4.0),
        "run": line("run", cost, 1.5, best={"score": best}, start_rows=4),
    }


def test_two_accounts_by_hand():
    """Best-of-2 of 0, 1, 2, 3 is 7/3 on average, so 100 (1 - (2/3) / 3) = 77.8. A run that scores
    7/3 for 16 tokens, of 40 that Best-of-2 costs, is 2.5 times cheaper; in seconds 3 to 1.5."""
    prompts = [made_up(idx, 7 / 3, 8) for idx in range(2)]
    size = Size(pool=4, block=4, fit_rows=2)
    base = BestOfN(prompts, size, prompts[:1])
    assert base.sizes == [1, 2, 3, 4]
    assert base.column(2) == pytest.approx([100 * (1 - (2 / 3) / 3)] * 2)
    assert base.column(4) == pytest.approx([100, 100])
    assert base.paper_seconds(4) == pytest.approx(6.0)
    assert base.packed_seconds(4) == pytest.approx(8.0)
    method = searched(base, "0.5", ["run"])
    assert np.all(method.tokens == 16)
    assert gain(base, method, "tokens").bound.value == pytest.approx(2.5)
    assert gain(base, method, "paper").bound.value == pytest.approx(2.0)
    assert gain(base, method, "tokens").interval == pytest.approx((2.5, 2.5))


def test_gains_are_compared_on_the_same_prompts():
    """Costs differ 1 to 10 between prompts, so the gains' own intervals are wide; yet 1.5 times the
    cost is two thirds of the gain whatever prompts are drawn."""
    prompts = [made_up(idx, 7 / 3, 8) for idx in range(4)]
    for idx, prompt in enumerate(prompts):
        cheap, dear = (made_up(idx, 7 / 3, c * (1 + 3 * idx)) for c in (4, 6))
        prompt |= {"run": cheap["run"], "dear": dear["run"]}
    base = BestOfN(prompts, Size(pool=4, block=4, fit_rows=2), prompts)
    methods = [searched(base, "0.5", ["run"]), searched(base, "0.7", ["dear"])]
    usual, other = (gain(base, m, "tokens") for m in methods)
    assert usual.interval[1] > 2 * usual.interval[0] and other.interval[1] > usual.interval[0]
    assert other.beside(usual) == pytest.approx((2 / 3, 2 / 3))
    found = [{account: gain(base, m, account) for account in ACCOUNTS} for m in methods]
    said = experiment_report.verdict(methods, found)
    assert (
        "- tokens, beside alpha 0.5 on the same prompts (paired): surely less at 0.7; surely more "
        "at none" in said
    )
    assert (
        "packed seconds, beside alpha 0.5 on the same prompts (paired): surely less at none" in said
    )


def test_a_winner_of_the_pool_scores_what_the_pool_does():
    """A pool keeps nine digits of a score, a run's winner all of them: the same score is 100."""
    prompts = [made_up(0, -48.26390329600001, 8)]
    prompts[0]["pool"]["scores"] = [-48.2639033, -50.0, -49.0, -51.0]
    base = BestOfN(prompts, Size(pool=4, block=4, fit_rows=2))
    assert searched(base, "0.5", ["run"]).scores.tolist() == [100.0]


def test_intervals_cover_the_seconds_of_best_of_n_too():
    """Two timed prompts, waves of 3 and of 6 s, alike in all else: drawn alone they give 2 and 4
    times; with one of them timed every draw that has it says the same."""
    prompts = [made_up(idx, 7 / 3, 8) for idx in range(2)]
    for name in ("wave seed 0", "wave seed 1"):
        prompts[1][name] = prompts[1][name] | {"generation_sec": 3.0, "reward_sec": 3.0}
    size = Size(pool=4, block=4, fit_rows=2)
    both, one = (BestOfN(prompts, size, timed) for timed in (prompts, prompts[:1]))
    found = [gain(base, searched(base, "0.5", ["run"]), "paper") for base in (both, one)]
    assert [g.bound.value for g in found] == pytest.approx([3.0, 2.0])
    assert found[0].interval == pytest.approx((2.0, 4.0))
    assert found[1].interval == pytest.approx((2.0, 2.0))


def test_a_prompt_counts_by_the_mean_of_the_seeds_that_it_has():
    prompts = [made_up(idx, 3.0, 8) for idx in range(2)]
    prompts[1]["again"] = made_up(1, 0.0, 20)["run"]
    base = BestOfN(prompts, Size(pool=4, block=4, fit_rows=2), prompts)
    found = searched(base, "0.5", ["run", "again"])
    assert found.num_runs == 3
    assert found.scores == pytest.approx([100, 50]) and found.tokens == pytest.approx([16, 28])


def test_between_sizes_and_beyond_the_pool():
    """Halfway in score between Best-of-2 and Best-of-4, cost is their geometric mean; above the
    pool's best there is only a bound. Without timed waves there are no seconds to compare."""
    size = Size(pool=4, block=4, fit_rows=2)
    prompts = [made_up(idx, (7 / 3 + 3) / 2, 8) for idx in range(2)]
    base = BestOfN(prompts, size, prompts)
    found = gain(base, searched(base, "0.5", ["run"]), "paper")
    assert found.bound.value == pytest.approx(math.sqrt(3.0 * 6.0) / 1.5)
    prompts = [made_up(idx, 4.0, 8) for idx in range(2)]
    base = BestOfN(prompts, size)
    beyond = gain(base, searched(base, "0.5", ["run"]), "tokens")
    assert beyond.bound == Bound(pytest.approx(80 / 16), ">=")
    assert gain(base, searched(base, "0.5", ["run"]), "paper") is None
