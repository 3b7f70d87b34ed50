"""A Python callable as the reward: `module:function`, called with (prompt, list of answers).

It returns one number for each answer. Text only, no state between rounds. What it does wrong (an
exception, the wrong number of results, something that is no number, too slow) fails the prompt with
the reason, never the run.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import math
from collections.abc import Callable, Sequence

from engine.candidates import Candidate
from rewards.base import RewardFailed
from rewards.model_reward import Decode


class FunctionReward:
    """Scores through a user's function. `timeout_sec` bounds one call."""

    tokens_read = 0
    num_params = 0
    kv_bytes = 0

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
            scores = self._call(answers)
        except RewardFailed:
            raise
        except Exception as error:  # whatever a user's function raises is the prompt's failure
            raise RewardFailed(f"{self.name} raised {type(error).__name__}: {error}") from error
        return self._checked(scores, len(answers))

    def _call(self, answers: list[str]) -> Sequence[float]:
        if self.timeout_sec is None:
            return self.function(self._prompt, answers)
        # NOTE: a thread that hangs can't be stopped; it is left behind, and not waited for.
        pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="reward")
        future = pool.submit(self.function, self._prompt, answers)
        try:
            return future.result(self.timeout_sec)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise  # the function's own TimeoutError
            raise RewardFailed(
                f"{self.name} took longer than --reward_timeout {self.timeout_sec:g} s"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _checked(self, scores: Sequence[float], expected: int) -> list[float]:
        try:
            numbers = [float(score) for score in scores]
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"{self.name} must return a list of numbers ({error})") from error
        if len(numbers) != expected:
            raise RewardFailed(f"{self.name} returned {len(numbers)} scores for {expected} answers")
        return [math.nan if math.isinf(number) else number for number in numbers]

    def keep_only(self, indices: Sequence[int]) -> None:
        pass

    def fork(self, parents: Sequence[int], children: Sequence[int]) -> None:
        pass


def load_function(name: str) -> Callable:
    """`module:function`. Raises ValueError where there is none, or it can't be called."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward {name!r}: {error}; it must be importable from here") from error
    if not callable(function):
        raise ValueError(f"reward {name!r} is a {type(function).__name__}, not a function")
    return function
