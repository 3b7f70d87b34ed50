"""A Python callable as the reward: `module:function`, called with (prompt, list of answers).

It returns one number for each answer. Text only, no state between rounds. What it does wrong (an
exception, the wrong number of results, something that is no number, too slow) fails the prompt with
the reason, never the run. It has a working folder of its own: where it calls os.chdir, the run's
relative paths stay what they were.
"""

from __future__ import annotations

import importlib
import math
import operator
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from engine.candidates import Candidate
from rewards.base import RewardFailed
from rewards.model_reward import Decode


class _WorkingFolder:
    """Of the user's code, from its import on; the process has only one at a time."""

    def __init__(self) -> None:
        self._theirs: str | None = None  # where it is not the run's

    @contextmanager
    def entered(self) -> Iterator[None]:
        ours = _current_folder()
        if self._theirs is not None:
            with suppress(OSError):  # they may have removed it
                os.chdir(self._theirs)
        try:
            yield
        finally:
            theirs = _current_folder()
            self._theirs = theirs if theirs != ours else None
            if ours is not None and theirs != ours:
                os.chdir(ours)


working_folder = _WorkingFolder()
MOST_SCORE = 1e100  # what postprocess/ reads; more is no number, as NaN and infinity are none


class FunctionReward:
    """Scores through a user's function. `timeout_sec` bounds one call."""

    tokens_read = 0
    num_params = 0
    kv_bytes = 0
    truncated: frozenset[int] = frozenset()

    def __init__(
        self, name: str, function: Callable, decode: Decode, timeout_sec: float | None
    ) -> None:
        self.name, self.function, self.decode = name, function, decode
        self.timeout_sec = timeout_sec

    def reset_counter(self) -> None:
        pass

    def fixed_tokens(self) -> tuple[int, int]:
        return 0, 0

    def begin(self, prompt: str) -> None:
        self._prompt = prompt

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        if not candidates:
            return []
        answers = self.decode([c.answer for c in candidates])
        try:
            with working_folder.entered():
                scores = self._call(answers)
            return self._checked(scores, len(candidates))
        except RewardFailed:
            raise
        except (Exception, SystemExit) as error:  # what a user's function raises fails the prompt
            raise RewardFailed(f"{self.name} raised {type(error).__name__}: {error}") from error

    def _call(self, answers: list[str]) -> list[Any]:
        if self.timeout_sec is None:
            return _listed(self.function(self._prompt, answers))
        # NOTE: a thread that hangs can't be stopped; it is left behind, and as a daemon it does not
        # keep the process from ending.
        outcome: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(1)
        work = (self.function, self._prompt, answers, outcome)
        threading.Thread(target=_run, args=work, name="reward", daemon=True).start()
        try:
            scores, error = outcome.get(timeout=self.timeout_sec)
        except queue.Empty:
            raise RewardFailed(
                f"{self.name} took longer than --reward_timeout {self.timeout_sec:g} s"
            ) from None
        if error is not None:
            raise error
        return scores

    def _checked(self, scores: list[Any], expected: int) -> list[float]:
        for score in scores:
            if isinstance(score, (str, bytes)):
                raise RewardFailed(f"{self.name} must return a list of numbers, got {score[:40]!r}")
        try:
            numbers = [float(score) for score in scores]
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardFailed(f"{self.name} must return a list of numbers ({error})") from error
        if len(numbers) != expected:
            raise RewardFailed(f"{self.name} returned {len(numbers)} scores for {expected} answers")
        return [number if abs(number) <= MOST_SCORE else math.nan for number in numbers]

    def keep_only(self, indices: Sequence[int]) -> None:
        pass

    def fork(self, parents: Sequence[int], children: Sequence[int]) -> None:
        pass


def _current_folder() -> str | None:
    """None where somebody has removed it."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _listed(scores: Any) -> list[Any]:
    """A list, array or generator of scores; runs what is left of the user's code."""
    if isinstance(scores, (Mapping, str, bytes)):
        raise TypeError(f"a list of numbers is needed, not a {type(scores).__name__}")
    return list(scores)


def _run(function: Callable, prompt: str, answers: list[str], outcome: queue.Queue) -> None:
    """The body of the thread: the function's scores, or what it raised."""
    try:
        outcome.put((_listed(function(prompt, answers)), None))
    except (Exception, SystemExit) as error:  # handed over to the thread that waits
        outcome.put(([], error))


def load_function(name: str) -> Callable:
    """`module:function`. Raises ValueError where there is none, or it can't be called."""
    module, _, attribute = name.partition(":")
    try:
        with working_folder.entered():
            function = operator.attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ValueError(
            f"reward {name!r}: {type(error).__name__}: {error}; it must be importable from here"
        ) from error
    if not callable(function):
        raise ValueError(f"reward {name!r} is a {type(function).__name__}, not a function")
    return function
