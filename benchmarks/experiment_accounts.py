"""Two accounts of one experiment: what a score costs in Best-of-N, and in Speculative Rejection.

The paper's account: Best-of-N on N / 120 GPUs of 120 rows each, GPU-seconds. The honest one:
generated plus scored tokens, and the seconds of Best-of-N packed whole on the GPU (all its memory,
more than Speculative Rejection is given, so Best-of-N is not held back). The score of Best-of-n is
the exact expectation over all subsets of the pool; scores are on the scale of
postprocess/plot_compare.py, the pool being 100. Seconds of Best-of-N are measured on some prompts
and carried to the others by the ratio of the pools' seconds.

Means are taken with a prompt's counts as weights: ones for all prompts, or bootstrap draws, so that
an interval covers scores and costs of both sides, the timed prompts too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.experiment_lines import exact
from benchmarks.experiment_plan import POOL, Size, packed_name, wave_name
from postprocess.pool import sizes_up_to, subset_weights
from postprocess.stats import BOOTSTRAP_DRAWS, BOOTSTRAP_SEED, MIN_RANGE, Bound, bootstrap, speedup

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

    def __post_init__(self) -> None:
        count = min(len(prompt[self.pool]["scores"]) for prompt in self.prompts)
        shown = [n for n in self.size.shown_sizes if n <= count]
        self.sizes = sorted({*sizes_up_to(count), *shown})
        self.scores = self._scores()
        totals = [tokens(p[self.pool]) / len(p[self.pool]["scores"]) for p in self.prompts]
        self.token_costs = np.outer(totals, self.sizes)

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

    @property
    def everyone(self) -> np.ndarray:
        """The counts that take every prompt once: `[1, prompts]`."""
        return np.ones((1, len(self.prompts)))

    def paper_seconds(self, n: int) -> float | None:
        return _only(self._paper(n, self.everyone))

    def packed_seconds(self, n: int) -> float | None:
        return _only(self._packed(n, self.everyone))

    @property
    def pool_seconds(self) -> float:
        return float(self._pool(self.everyone)[0])

    def _paper(self, n: int, counts: np.ndarray) -> np.ndarray | None:
        wave = self._wave(counts)
        return None if wave is None else wave * math.ceil(n / self.size.fit_rows)

    def _packed(self, n: int, counts: np.ndarray) -> np.ndarray | None:
        if n == self.size.pool == self.size.block:
            return self._pool(counts)
        if n == self.size.fit_rows:
            return self._wave(counts)
        return self._measured(packed_name(n), counts)

    def _wave(self, counts: np.ndarray) -> np.ndarray | None:
        """Seconds of `fit_rows` rows: the mean of two waves."""
        found = [self._measured(wave_name(seed), counts) for seed in (0, 1)]
        known = [value for value in found if value is not None]
        return np.mean(known, axis=0) if known else None

    def _measured(self, name: str, counts: np.ndarray) -> np.ndarray | None:
        """Mean seconds of a timed configuration, by the ratio to its prompts' pools; NaN in a draw
        without a timed prompt."""
        timed = {prompt[self.pool]["JSON_idx"] for prompt in self.timing if name in prompt}
        chosen = np.array([p[self.pool]["JSON_idx"] in timed for p in self.prompts])
        if not chosen.any():
            return None
        mine = [p for p, wanted in zip(self.prompts, chosen, strict=True) if wanted]
        own, pools = (counts[:, chosen] @ [seconds(p[k]) for p in mine] for k in (name, self.pool))
        pools[pools == 0] = math.nan
        return own / pools * self._pool(counts)

    def _pool(self, counts: np.ndarray) -> np.ndarray:
        return weighted([seconds(prompt[self.pool]) for prompt in self.prompts], counts)

    def curve(self, account: str, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Costs and scores of Best-of-n by size, each `[draws, sizes]`: those with a known cost."""
        scores = weighted(self.scores, counts)
        if account == "tokens":
            return weighted(self.token_costs, counts), scores
        cost_of = self._paper if account == "paper" else self._packed
        found = {n: cost_of(n, counts) for n in self.shown}
        known = [n for n, cost in found.items() if cost is not None]
        costs = np.array([found[n] for n in known]).reshape(len(known), len(counts)).T
        return costs, scores[:, [self.sizes.index(n) for n in known]]


def weighted(values: Any, counts: np.ndarray) -> np.ndarray:
    """Means of `values [prompts, ...]` by `counts [draws, prompts]`: `[draws, ...]`."""
    return ((counts @ np.asarray(values, float)).T / counts.sum(axis=1)).T


def _only(values: np.ndarray | None) -> float | None:
    return None if values is None else float(values[0])


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
        mean(lambda prompt, line: base.score(prompt, exact(line["best"]["score"]))),
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
    draws: np.ndarray | None = field(default=None, compare=False, repr=False)

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
    num = len(base.prompts)
    (found,) = _gains(base, method, account, base.everyone)
    if found is None:
        return None
    if num < 2:
        return Gain(found, None)
    rng = np.random.default_rng(BOOTSTRAP_SEED)  # the same draws for every method: paired
    counts = rng.multinomial(num, np.full(num, 1 / num), BOOTSTRAP_DRAWS).astype(float)
    drawn = _gains(base, method, account, counts)
    values = np.array([math.nan if bound is None else bound.value for bound in drawn])
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Gain(found, (float(low), float(high)), values)


def _gains(base: BestOfN, method: Searched, account: str, counts: np.ndarray) -> list[Bound | None]:
    """One a draw; None where no cost of Best-of-N is known."""
    own = weighted(method.costs(account), counts), weighted(method.scores, counts)
    curves = (array.tolist() for array in base.curve(account, counts))
    return [
        None if any(map(math.isnan, costs)) else speedup(list(zip(costs, scores, strict=True)), *at)
        for costs, scores, *at in zip(*curves, *(array.tolist() for array in own), strict=True)
    ]


def interval_text(values: np.ndarray) -> str:
    found = bootstrap(values)
    return "-" if found is None else f"{found[0]:.1f} to {found[1]:.1f}"
