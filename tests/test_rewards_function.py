"""A Python function as the reward: what it may return, and everything it can do wrong."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.candidates import Candidate, End
from rewards.base import RewardFailed
from rewards.function_reward import FunctionReward, load_function

ANSWERS = ["one", "two", "three"]


def reward(function: Callable, timeout: float | None = None) -> FunctionReward:
    texts = dict(enumerate(ANSWERS))
    made = FunctionReward("mine:f", function, lambda ids: [texts[int(i[0])] for i in ids], timeout)
    made.begin("the prompt")
    return made


def candidates() -> list[Candidate]:
    """The third has stopped: its stop token is no part of its answer."""
    ids = [[0], [1], [2, 99]]
    ends = [End.RUNNING, End.LENGTH, End.STOP]
    rows = zip(ids, ends, strict=True)
    return [Candidate(i, np.asarray(tokens), end) for i, (tokens, end) in enumerate(rows)]


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_the_function_gets_prompt_and_answers(timeout: float | None) -> None:
    seen = []

    def function(prompt: str, answers: list[str]) -> list[int]:
        seen.append((prompt, list(answers)))
        answers.clear()  # its own list: nothing of ours changes
        return [3, 1, 2]

    made = reward(function, timeout)
    assert made.score(candidates()) == [3.0, 1.0, 2.0]
    assert seen == [("the prompt", ANSWERS)]
    assert made.score([]) == [] and len(seen) == 1
    assert (made.tokens_read, made.kv_bytes, made.num_params) == (0, 0, 0)
    made.keep_only([0])
    made.fork([0], [3])
    made.reset_counter()


@pytest.mark.parametrize(
    "scores",
    [
        np.asarray([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0]),
        (Decimal(1), np.float32(2), True + 2),
        (float(n) for n in (1, 2, 3)),
    ],
    ids=["numpy", "torch", "mixed", "generator"],
)
def test_anything_that_is_a_row_of_numbers_will_do(scores: Any) -> None:
    assert reward(lambda prompt, answers: scores).score(candidates()) == [1.0, 2.0, 3.0]


def test_scores_that_are_no_finite_number_are_no_score() -> None:
    """CASES 6: NaN and infinities are handed on as NaN, which never wins."""
    got = reward(lambda p, a: [math.nan, math.inf, -1e300]).score(candidates())
    assert all(math.isnan(score) for score in got)


def raises(prompt: str, answers: list[str]) -> list[float]:
    raise KeyError("broken inside")


def raises_late(prompt: str, answers: list[str]) -> Any:
    yield 1.0
    raise ZeroDivisionError("on the way")


def raises_timeout(prompt: str, answers: list[str]) -> list[float]:
    raise TimeoutError("its own")


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "mine:f raised KeyError: 'broken inside'"),
        (raises_late, "raised ZeroDivisionError: on the way"),
        (raises_timeout, "raised TimeoutError: its own"),
        (lambda prompt: [1, 2, 3], "raised TypeError.*positional"),
        (lambda p, a: [1, 2], "returned 2 scores for 3 answers"),
        (lambda p, a: [1, 2, 3, 4], "returned 4 scores for 3 answers"),
        (lambda p, a: [], "returned 0 scores"),
        (lambda p, a: 1.5, "TypeError"),
        (lambda p, a: None, "TypeError"),
        (lambda p, a: "123", "not a str"),
        (lambda p, a: {0: 1, 1: 2, 2: 3}, "not a dict"),
        (lambda p, a: ["1", "2", "3"], "list of numbers, got '1'"),
        (lambda p, a: [1, None, 3], "must return a list of numbers"),
        (lambda p, a: [1, [2], 3], "must return a list of numbers"),
        (lambda p, a: [1, 10**400, 3], "must return a list of numbers"),
        (lambda p, a: np.ones((3, 2)), "must return a list of numbers"),
    ],
)
def test_what_the_function_does_wrong_fails_the_prompt(function, message, timeout) -> None:
    with pytest.raises(RewardFailed, match=message):
        reward(function, timeout).score(candidates())


def test_a_function_that_hangs_is_left_behind() -> None:
    release = threading.Event()

    def hangs(prompt: str, answers: list[str]) -> list[float]:
        release.wait(60)
        return [1, 2, 3]

    start = time.monotonic()
    with pytest.raises(RewardFailed, match=r"longer than --reward_timeout 0\.2 s"):
        reward(hangs, 0.2).score(candidates())
    assert time.monotonic() - start < 10
    release.set()
    assert reward(lambda p, a: [1, 2, 3], 20).score(candidates()) == [1, 2, 3]


def test_a_hanging_function_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    """The run must be able to end after a function that never returns."""
    script = (
        "import time\n"
        "from rewards.base import RewardFailed\n"
        "from rewards.function_reward import FunctionReward\n"
        "from engine.candidates import Candidate\n"
        "r = FunctionReward('m:f', lambda p, a: time.sleep(120), lambda ids: ['x'], 0.1)\n"
        "r.begin('p')\n"
        "try:\n    r.score([Candidate(0)])\n"
        "except RewardFailed:\n    print('failed as it should')\n"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "failed as it should" in done.stdout, done.stderr


def test_functions_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "good_reward.py").write_text("def f(p, a): return [len(x) for x in a]\nn = 3\n")
    (tmp_path / "bad_syntax.py").write_text("def f(:\n")
    (tmp_path / "bad_import.py").write_text("raise RuntimeError('no GPU for me')\n")
    assert load_function("good_reward:f")("p", ["ab"]) == [2]
    assert load_function("os:path.basename")("a/b") == "b"
    for name, message in {
        "good_reward:g": "no attribute 'g'",
        "good_reward:n": "is a int, not a function",
        "nowhere_at_all:f": "importable from here",
        "bad_syntax:f": "SyntaxError",
        "bad_import:f": "RuntimeError: no GPU for me",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_function(name)
