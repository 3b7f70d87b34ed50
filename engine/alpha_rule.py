"""`--alpha auto`: how much to drop, and when to end, from how well scores have foretold themselves.

How much. Let rho be the rank correlation of the scores now with the final ones, and z* the height
of the best of n rows (the 1 - 1/n quantile of a normal). If both scores are jointly normal, the row
that will be best at the end stands, in today's scores, around rho z* with deviation
sqrt(1 - rho^2). Dropping the fraction alpha loses it with probability `loss` where

    alpha = Phi(rho z* + sqrt(1 - rho^2) Phi^-1(loss)),  at most 0.8.

A doubling of the length may cost LOSS; a shorter step its share of that, in log-length.

rho itself is not observed before the end. What is: r, the rank correlation (Spearman) of this
round's scores with the last round's of the same rows. Scores gather evidence with length like a
random walk in log-length: each further stretch by the same ratio costs a factor r, so
rho = r^m, where m = log(L_end / L) / log(L / L_last), and L_end is the length to expect: L plus the
tokens generated for each answer that has ended so far, at most the length bound. Without a past
round, or with fewer than MIN_PAIRS rows, rho is DEFAULT_CORRELATION.

When to end. The changes of the same rows since the last round have mean d and deviation s; until
the end a row changes by about m d with deviation s sqrt(m). Where the chance that any unfinished
row ends above the best finished one is below CHANCE, more tokens are not expected to change the
winner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

MOST = 0.8
LOSS = 0.05  # accepted chance, a doubling, to drop the row that would have been the best
CHANCE = 0.05  # of a change of the winner, below which a run ends
DEFAULT_CORRELATION = 0.3  # measured for a small reward model at 32 tokens
MIN_PAIRS = 8
HIGHEST_CORRELATION = 0.99
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rule says of a round."""

    alpha: float
    correlation: float  # rho
    ends: bool  # more tokens are not expected to change the winner


@dataclass(slots=True)
class AutoAlpha:
    """The rule's memory: the values of the rows that went on, and their length then."""

    values: dict[int, float] = field(default_factory=dict)
    length: int = 0

    def loss(self, length: int) -> float:
        """The accepted chance of losing the coming best row in this round."""
        if not 0 < self.length < length:
            return LOSS
        return LOSS * min(1.0, math.log2(length / self.length))

    def decide(
        self,
        unfinished: Mapping[int, float],
        finished: Mapping[int, float],
        length: int,
        end_length: float,
    ) -> Verdict:
        """`finished` holds final scores, `unfinished` what rows of `length` tokens rank by."""
        pairs = self._pairs({**unfinished, **finished})
        stretches = self._stretches(length, end_length)
        rho = DEFAULT_CORRELATION
        if stretches is not None and len(pairs) >= MIN_PAIRS:
            r = spearman(pairs[:, 0], pairs[:, 1])
            rho = min(max(r, 0.0) ** stretches, HIGHEST_CORRELATION)
        ends = False
        if stretches is not None and finished and len(pairs) >= MIN_PAIRS:
            changes = pairs[:, 1] - pairs[:, 0]
            best = max(finished.values())
            ends = chance_to_pass(best, unfinished, changes, stretches) < CHANCE
        alpha = fraction_to_drop(rho, len(unfinished), self.loss(length))
        return Verdict(alpha, rho, ends)

    def remember(self, kept: Mapping[int, float], length: int) -> None:
        """These rows go on; forks are given with their parent's value."""
        self.values, self.length = dict(kept), length

    def _pairs(self, now: Mapping[int, float]) -> np.ndarray:
        """`[rows, 2]`: the last round's value and this one's, of the rows that have both."""
        pairs = [(self.values[i], value) for i, value in now.items() if i in self.values]
        array = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
        return array[np.isfinite(array).all(axis=1)]

    def _stretches(self, length: int, end_length: float) -> float | None:
        """m: how many stretches like the last one are left."""
        if not 0 < self.length < length:
            return None
        return math.log(max(end_length, length) / length) / math.log(length / self.length)


def expected_end(length: int, tokens_generated: int, num_ended: int, bound: int) -> float:
    """Length that unfinished rows reach: answers end at the rate seen so far."""
    return min(bound, length + tokens_generated / max(1, num_ended))


def fraction_to_drop(rho: float, num_rows: int, loss: float = LOSS) -> float:
    """The largest fraction that loses the coming best row with this probability at most."""
    height = NORMAL.inv_cdf(1 - 1 / max(2, num_rows))
    middle = rho * height + math.sqrt(1 - rho * rho) * NORMAL.inv_cdf(loss)
    return min(NORMAL.cdf(middle), MOST)


def chance_to_pass(
    best: float, unfinished: Mapping[int, float], changes: np.ndarray, stretches: float
) -> float:
    """The chance that any unfinished row ends above `best`."""
    values = np.asarray([v for v in unfinished.values() if math.isfinite(v)], dtype=np.float64)
    middle = values + stretches * changes.mean()
    spread = float(changes.std(ddof=1)) * math.sqrt(stretches)
    if spread == 0:
        return float((middle > best).any())
    below = [NORMAL.cdf((best - m) / spread) for m in middle]
    return 1 - math.prod(below)


def spearman(left: np.ndarray, right: np.ndarray) -> float:
    """Rank correlation with average ranks for ties; 0 where one side is constant."""
    a, b = _ranks(left), _ranks(right)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
