"""A pool of candidates as the measure of a search: z, equivalent N, and Best-of-n for every n.

z of a reward is its distance above the mean of the prompt's pool in standard deviations; N_eq =
1 / (1 - Phi(z)) is the N whose best of N normal draws stands about there. Best-of-n of a pool of N
is an exact expectation over all subsets of n, not a simulation. Everything is per prompt; averages
over prompts are means of z and geometric means of N_eq.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LARGEST_Z = 8.0  # beyond, 1 - Phi(z) is below double precision's use


@dataclass(frozen=True, slots=True)
class Pool:
    """One prompt's candidates: score, generated tokens, tokens that scoring it once reads."""

    scores: np.ndarray
    generated: np.ndarray
    scored: np.ndarray
    prompt_tokens: int = 0  # read once by the reward model

    def z(self, score: float | np.ndarray) -> np.ndarray:
        spread = float(self.scores.std())
        return (np.asarray(score) - self.scores.mean()) / (spread or 1.0)

    def best_of(self, n: int) -> tuple[float, float]:
        """(z, log N_eq) of Best-of-n, expected over all subsets of n."""
        weights = subset_weights(len(self.scores), n)
        z = self.z(np.sort(self.scores))
        return float(weights @ z), float(weights @ log_n_eq(z))

    def cost_of(self, n: int) -> tuple[float, float]:
        """(tokens generated, tokens scored) of Best-of-n, expected."""
        return n * float(self.generated.mean()), self.prompt_tokens + n * float(self.scored.mean())


def subset_weights(size: int, n: int) -> np.ndarray:
    """The chance of each value, in ascending order, to be the largest of a random subset of n."""
    if not 1 <= n <= size:
        raise ValueError(f"n must be from 1 to the pool's size {size}, got {n}")
    weights = np.zeros(size)
    weight = n / size  # of the largest value
    for place in range(size - 1, n - 2, -1):
        weights[place] = weight
        # The next lower one: C(place - 1, n - 1) / C(place, n - 1).
        weight *= (place - n + 1) / place if place else 0.0
    return weights


def log_n_eq(z: float | np.ndarray) -> np.ndarray:
    """log of 1 / (1 - Phi(z))."""
    values = np.clip(np.asarray(z, dtype=np.float64), -LARGEST_Z, LARGEST_Z)
    tails = [0.5 * math.erfc(x / math.sqrt(2)) for x in values.reshape(-1)]
    return -np.log(np.asarray(tails)).reshape(values.shape)


def curve(pools: Sequence[Pool], sizes: Sequence[int]) -> list[tuple[int, float, float, float]]:
    """(n, mean z, mean log N_eq, mean tokens) of Best-of-n over prompts, for each size."""
    rows = []
    for n in sizes:
        best = np.asarray([pool.best_of(n) for pool in pools])
        tokens = np.mean([sum(pool.cost_of(n)) for pool in pools])
        rows.append((n, float(best[:, 0].mean()), float(best[:, 1].mean()), float(tokens)))
    return rows


def sizes_up_to(size: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the size itself."""
    found = {size}
    step = 1
    while step <= size:
        found |= {step, step + step // 2}
        step *= 2
    return sorted(n for n in found if n <= size)


def cost_at(points: Sequence[tuple[float, float]], value: float) -> float | None:
    """The cost at which a curve of (cost, value) points reaches a value, by log-linear steps.

    None outside of the curve: nothing is extrapolated.
    """
    ordered = sorted(points)
    for (x0, y0), (x1, y1) in zip(ordered, ordered[1:], strict=False):
        if min(y0, y1) <= value <= max(y0, y1) and y0 != y1 and x0 > 0:
            share = (value - y0) / (y1 - y0)
            return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
    return next((x for x, y in ordered if y == value), None)
