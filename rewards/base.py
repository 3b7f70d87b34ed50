"""What a reward is to the methods: prompt and candidates in, one number each out.

A reward may keep state between rounds of one prompt; `keep_only` and `fork` tell it what became of
the candidates. Scores never depend on the candidates scored beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from engine.candidates import Candidate


class RewardFailed(RuntimeError):
    """The reward could not score this prompt's candidates; the message says why."""


class Reward(Protocol):
    """Scores the candidates of one prompt at a time."""

    tokens_read: int  # by the model since `reset_counter`; 0 where nothing is known
    num_params: int  # of the reward model; 0 where there is none
    truncated: AbstractSet[int]  # candidates of the prompt whose answer was not read to its end

    def reset_counter(self) -> None:
        """Count the tokens read from zero."""

    def fixed_tokens(self) -> tuple[int, int]:
        """Tokens read once a prompt, and those read behind each answer each time it is scored."""

    def begin(self, prompt: str) -> None:
        """Start on a prompt; forgets the last one's candidates."""

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        """One score for each, of its tokens as they stand. NaN where there is no score."""

    def keep_only(self, indices: Sequence[int]) -> None:
        """Only these candidates will be scored again."""

    def fork(self, parents: Sequence[int], children: Sequence[int]) -> None:
        """Each child goes on from its parent's text."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that it holds now."""
