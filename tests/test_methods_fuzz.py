"""Random runs of Speculative Rejection: every survivor is Best-of-N's candidate, and all add up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.method_runs import Made, run_search, scores, texts
from tests.reward_models import make_armo, make_eurus, make_farm, merge_tokens
from tests.tiny import ARCHITECTURES, make_tiny_llama, make_tiny_reward

LENGTHS = (1, 2, 9, 33, 64, 65, 66, 97, 130)  # answers around the borders of pages of 32 tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    for arch in ARCHITECTURES:
        make_tiny_llama(folder / arch, arch=arch)
    make_tiny_reward(folder / "same-ids")
    merge_tokens(make_tiny_reward(folder / "merges", vocab=330), ["he", "ok", "Ġa", "??", "Ċ"])
    for make in (make_armo, make_eurus, make_farm):
        make(folder / make.__name__)
    return folder


def random_runs(seed: int, count: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(settings of both methods, those of Speculative Rejection alone)."""
    rng = random.Random(seed)
    for _ in range(count):
        generator = rng.choice(ARCHITECTURES)
        rewards = ["same-ids", "merges", "make_armo", "make_eurus", "make_farm", generator]
        longest, rows = rng.choice(LENGTHS), rng.choice((1, 2, 3, 5, 9, 17, 30))
        pages_of_one = max(1, -(-(longest - 1) // 32))
        both = {
            "llm_name": generator,
            "reward": rng.choice(rewards),
            "max_gen_tokens": longest,
            "seed": rng.randint(0, 5),
            "temperature": rng.choice((0.7, 1.0, 1.5)),
            "top_k": rng.choice((0, 5, 50)),
            "top_p": rng.choice((1.0, 0.8)),
        }
        yield (
            both,
            {
                "kv_pages": rng.randint(pages_of_one, 3 * pages_of_one + 2 * rows),
                "init_batch_size": rows,
                "alpha": rng.choice((0.1, 0.3, 0.5, 0.9, "auto")),
                "min_round_tokens": rng.choice((1, 8, 20)),
                "schedule": rng.choice(("memory", "halving", "fixed:7")),
                "refill": rng.random() < 0.4,
                "min_tokens": rng.choice((0, 0, 16)),
                "reward_cache": rng.choice(("auto", "on", "off")),
            },
        )


def check(made: Made, best: Made) -> None:
    kinds = ("trajectories", "rejected", "failed_rows")
    ends = sorted(entry["candidate"] for kind in kinds for entry in made[kind])
    assert ends == list(range(len(ends))), "each candidate ends once"
    assert made["trajectories"]
    own = [t["candidate"] for t in made["trajectories"] if "parent" not in t]
    assert {i: texts(made)[i] for i in own} == {i: texts(best)[i] for i in own}
    expected = {i: pytest.approx(scores(best)[i], rel=1e-3, abs=1e-3) for i in own}
    assert {i: scores(made)[i] for i in own} == expected
    for name in ("tokens_generated", "tokens_scored"):
        assert made[name] == sum(entry[name] for entry in made["rounds"])
    assert made["rounds"][-1]["kv_bytes"] == 0, "nothing is left in the cache"


def run_all(models: Path, seed: int, count: int) -> None:
    for both, alone in random_runs(seed, count):
        made = run_search(models, **both, **alone)
        started = [0, *(t["candidate"] for t in made["trajectories"] if "parent" not in t)]
        best = run_search(models, **both, batch_size=max(started) + 1)
        try:
            check(made, best)
        except AssertionError as error:
            raise AssertionError(f"{both} {alone}: {error}") from error


def test_random_runs_keep_the_promises_of_the_design(models: Path) -> None:
    run_all(models, seed=0, count=14)


@pytest.mark.long
def test_many_random_runs_keep_the_promises_of_the_design(models: Path) -> None:
    run_all(models, seed=1, count=400)
