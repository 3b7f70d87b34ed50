"""A candidate answer: its token ids, its score, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class End(Enum):
    """How a candidate ended; the values are those of `finish_reason` in the files."""

    RUNNING = "running"
    STOP = "stop"  # a stop token, which is the last of `tokens`
    LENGTH = "length"  # the length bound
    REJECTED = "rejected"  # cut by the reward model
    FAILED = "failed"  # logits without a finite value


@dataclass(slots=True)
class Candidate:
    """`index` keys its random stream; forks name the parent and the tokens they share with it."""

    index: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    end: End = End.RUNNING
    score: float | None = None
    parent: int | None = None
    fork_length: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def answer(self) -> np.ndarray:
        """The token ids without the stop token."""
        return self.tokens[:-1] if self.end is End.STOP else self.tokens
