"""Two accounts of one experiment: what a score costs in Best-of-N, and in Speculative Rejection.

The paper's account: Best-of-N on N / 120 GPUs of 120 rows each, GPU-seconds. The honest one:
generated plus scored tokens, and the seconds of Best-of-N packed whole on the GPU (all its memory,
more than Speculative Rejection is given, so Best-of-N is not held back). The score of Best-of-n is
the exact expectation over all subsets of the pool; scores are on the scale of
postprocess/plot_compare.py, the pool being 100. Seconds of Best-of-N are measured on some prompts
and carried to the others by the ratio of the pools' seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.experiment_plan import POOL, Size, packed_name, wave_name
from postprocess.pool import sizes_up_to, subset_weights
from postprocess.stats import MIN_RANGE, Bound, bootstrap, speedup

DRAWS = 1000
ACCOUNTS = ("paper", "packed", "tokens")
Line = dict[str, Any]
Prompt = dict[str, Line]  # lines of one prompt by configuration


def by_prompt(lines: Sequence[Line]) -> dict[int, Prompt]:
    found: dict[int, Prompt] = {}
    for line in lines:
        if "failed" not in line:
            found.setdefault(line["JSON_idx"], {})[line["config"]] = line
    return found


def whole(prompts: dict[int, Prompt], names: Sequence[str]) -> list[Prompt]:
    """The prompts that have all of these configurations, and a pool whose scores differ."""
    pool = names[0]
    return [
        prompt
        for _, prompt in sorted(prompts.items())
        if all(name in prompt for name in names) and np.ptp(prompt[pool]["scores"]) > MIN_RANGE
    ]


def seconds(line: Line) -> float:
    """Of generation and scoring; loading, recording and decoding of text are not counted."""
    return line["generation_sec"] + line["reward_sec"]


def tokens(line: Line) -> int:
    return line["tokens_generated"] + line["tokens_scored"]


@dataclass(slots=True)
class BestOfN:
    """Scores and costs of Best-of-n over prompts: rows are prompts, columns `sizes`."""

    prompts: list[Prompt]
    size: Size
    timing: list[Prompt] = field(default_factory=list)  # prompts with measured waves
    pool: str = POOL
    sizes: list[int] = field(init=False)
    scores: np.ndarray = field(init=False)  # [prompts, sizes]
    token_costs: np.ndarray = field(init=False)  # [prompts, sizes]
    costs: dict[str, list[float | None]] = field(init=False)  # seconds of the shown sizes

    def __post_init__(self) -> None:
        count = min(len(prompt[self.pool]["scores"]) for prompt in self.prompts)
        shown = [n for n in self.size.shown_sizes if n <= count]
        self.sizes = sorted({*sizes_up_to(count), *shown})
        self.scores = self._scores()
        totals = [tokens(p[self.pool]) / len(p[self.pool]["scores"]) for p in self.prompts]
        self.token_costs = np.outer(totals, self.sizes)
        self.costs = {
            "paper": [self.paper_seconds(n) for n in self.shown],
            "packed": [self.packed_seconds(n) for n in self.shown],
        }

    @property
    def shown(self) -> list[int]:
        return [n for n in self.size.shown_sizes if n in self.sizes]

    def _scores(self) -> np.ndarray:
        weights: dict[int, np.ndarray] = {}  # [sizes, candidates] by the number of candidates
        rows = []
        for prompt in self.prompts:
            ordered = np.sort(prompt[self.pool]["scores"])
            count = len(ordered)
            if count not in weights:
                weights[count] = np.array([subset_weights(count, n) for n in self.sizes])
            best = weights[count] @ ordered
            rows.append([self.score(prompt, float(value)) for value in best])
        return np.array(rows)

    def score(self, prompt: Prompt, value: float) -> float:
        """100 is the pool's best; a point is a hundredth of its range."""
        scores = prompt[self.pool]["scores"]
        # Rounded: a last digit must not lift a score above the pool's own best.
        return round(100 * (1 + (value - max(scores)) / (max(scores) - min(scores))), 9)

    def column(self, n: int) -> np.ndarray:
        return self.scores[:, self.sizes.index(n)]

    def measured(self, name: str) -> float | None:
        """Mean seconds of a timed configuration, by the ratio to its prompts' pools."""
        rows = [prompt for prompt in self.timing if name in prompt]
        if not rows:
            return None
        ratio = sum(seconds(p[name]) for p in rows) / sum(seconds(p[self.pool]) for p in rows)
        return ratio * self.pool_seconds

    @property
    def pool_seconds(self) -> float:
        return float(np.mean([seconds(prompt[self.pool]) for prompt in self.prompts]))

    @property
    def wave_seconds(self) -> float | None:
        """Of `fit_rows` rows: the mean of two waves."""
        found = [self.measured(wave_name(seed)) for seed in (0, 1)]
        known = [value for value in found if value is not None]
        return float(np.mean(known)) if known else None

    def paper_seconds(self, n: int) -> float | None:
        wave = self.wave_seconds
        return None if wave is None else wave * math.ceil(n / self.size.fit_rows)

    def packed_seconds(self, n: int) -> float | None:
        if n == self.size.pool == self.size.block:
            return self.pool_seconds
        return self.wave_seconds if n == self.size.fit_rows else self.measured(packed_name(n))

    def curve(self, account: str, rows: np.ndarray) -> list[tuple[float, float]]:
        """(cost, score) points of Best-of-n over these rows (prompts, repeats allowed)."""
        means = self.scores[rows].mean(axis=0)
        if account == "tokens":
            costs = self.token_costs[rows].mean(axis=0)
            return list(zip(costs.tolist(), means.tolist(), strict=True))
        found = zip(self.costs[account], self.shown, strict=True)
        return [(cost, float(means[self.sizes.index(n)])) for cost, n in found if cost is not None]


@dataclass(frozen=True, slots=True)
class Searched:
    """A configuration beside Best-of-N: per prompt, means over the seeds that it has."""

    name: str
    num_runs: int  # prompts x seeds
    scores: np.ndarray
    seconds: np.ndarray
    generated: np.ndarray
    scored: np.ndarray
    start_rows: float
    completed: float

    @property
    def tokens(self) -> np.ndarray:
        return self.generated + self.scored

    def costs(self, account: str) -> np.ndarray:
        return self.tokens if account == "tokens" else self.seconds


def searched(base: BestOfN, name: str, configs: Sequence[str]) -> Searched:
    """`configs` are the seeds of one way to search; a prompt has the first of them at the least."""
    lines = [[p[c] for c in configs if c in p] for p in base.prompts]

    def mean(value_of: Any) -> np.ndarray:
        pairs = zip(base.prompts, lines, strict=True)
        return np.array([np.mean([value_of(p, line) for line in mine]) for p, mine in pairs])

    return Searched(
        name,
        sum(map(len, lines)),
        mean(lambda prompt, line: base.score(prompt, line["best"]["score"])),
        mean(lambda _, line: seconds(line)),
        mean(lambda _, line: line["tokens_generated"]),
        mean(lambda _, line: line["tokens_scored"]),
        float(mean(lambda _, line: line["start_rows"]).mean()),
        float(mean(lambda _, line: line["num_completed"]).mean()),
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """Best-of-N's cost at the same score over the method's; 95 % interval over prompts."""

    bound: Bound
    interval: tuple[float, float] | None
    draws: np.ndarray | None = field(default=None, compare=False, repr=False)  # [DRAWS]

    def beside(self, other: Gain) -> tuple[float, float] | None:
        """95 % interval of this gain over another's, drawn over the same prompts (paired)."""
        if self.draws is None or other.draws is None:
            return None
        low, high = np.nanpercentile(self.draws / other.draws, [2.5, 97.5])
        return float(low), float(high)

    def __str__(self) -> str:
        if self.interval is None:
            return str(self.bound)
        return f"{self.bound} ({self.interval[0]:.3g} to {self.interval[1]:.3g})"


def gain(base: BestOfN, method: Searched, account: str) -> Gain | None:
    """None where the account has no cost of Best-of-N (nothing was timed)."""
    everyone = np.arange(len(base.prompts))
    found = _gain(base, method, account, everyone)
    if found is None:
        return None
    if len(everyone) < 2:
        return Gain(found, None)
    rng = np.random.default_rng(0)  # the same draws for every method: they can be paired
    drawn = [
        _gain(base, method, account, rows)
        for rows in rng.integers(0, len(everyone), (DRAWS, len(everyone)))
    ]
    values = np.array([math.nan if bound is None else bound.value for bound in drawn])
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Gain(found, (float(low), float(high)), values)


def _gain(base: BestOfN, method: Searched, account: str, rows: np.ndarray) -> Bound | None:
    cost = float(method.costs(account)[rows].mean())
    return speedup(base.curve(account, rows), cost, float(method.scores[rows].mean()))


def interval_text(values: np.ndarray) -> str:
    found = bootstrap(values)
    return "-" if found is None else f"{found[0]:.1f} to {found[1]:.1f}"
