"""Runs of both methods with memory for several rounds, and what is asked of every run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.search import run_search as run_short_search

PAGE = 32  # tokens of a page on a CPU
MAX_ANSWER = 200  # seven pages
PAGES = 128  # two for each of 64 rows: enough for the first stretch
FUNCTION = "tests.harness:hash_reward"
Made = dict[str, Any]


def run_search(models: Path, **changes: Any) -> Made:
    return run_short_search(models, **{"max_gen_tokens": MAX_ANSWER, **changes})


def texts(made: Made) -> dict[int, list[int]]:
    return {t["candidate"]: t["token_ids"] for t in made["trajectories"]}


def scores(made: Made) -> dict[int, float]:
    return {t["candidate"]: t["score"] for t in made["trajectories"]}


def check_conservation(made: Made, rows: int) -> None:
    """CASES 18: each candidate ends once, with its end."""
    ends = Counter(
        entry["candidate"]
        for kind in ("trajectories", "rejected", "failed_rows")
        for entry in made[kind]
    )
    assert ends == Counter(range(rows))
    assert [t["candidate"] for t in made["trajectories"]] == sorted(texts(made))
