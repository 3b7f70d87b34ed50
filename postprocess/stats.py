"""The numbers of the comparison: improvement, relative compute, intervals, speed-up.

Definitions as in the paper's scripts. Prompts are paired by JSON_idx; whatever is left out of a
pairing is named in a warning. The invariant: no result depends on prompts that only one side has,
and nothing is divided by zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from postprocess.command import LOG
from postprocess.reading import PromptResult, differences
from postprocess.runs import Run

BOOTSTRAP_SEED = 0
BOOTSTRAP_DRAWS = 10_000
# What must be the same for two runs to draw from one distribution and stop at one bound.
SHARED_SETTINGS = (
    *("max_tokens", "max_gen_tokens", "top_k", "top_p", "temperature", "prompt_template"),
    *("ignore_stop", "dtype"),
)
# Below this a range is zero: ratios stay finite, and no model tells scores apart by so little.
MIN_RANGE = 1e-100


@dataclass(frozen=True, slots=True)
class Bound:
    """A number, or a bound on it: sign is "", ">=" or "<="."""

    value: float
    sign: str = ""

    def __str__(self) -> str:
        return f"{self.sign}{self.value:.3g}"


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of generator and reward model: what one generated and one scored token cost."""

    generator: int
    reward: int

    @property
    def equal(self) -> bool:
        return self.generator == self.reward == 1


@dataclass(slots=True)
class Comparison:
    """One method against the base, over the prompts that both have (several seeds: averaged)."""

    runs: list[Run]
    num_prompts: int
    score: float
    interval: tuple[float, float] | None
    seconds: float
    relative_time: float
    relative_gpu: float
    generation_sec: float
    reward_sec: float
    tokens_generated: float | None
    tokens_scored: float | None
    relative_tokens: float | None
    peak_memory_bytes: int | None
    speedup_gpu: Bound | None = None
    speedup_tokens: Bound | None = None

    @property
    def run(self) -> Run:
        return self.runs[0]


def best_score(result: PromptResult) -> float:
    assert result.best is not None, "a loaded run has a winner for every prompt"
    return result.best.score


def score_ranges(base: Run) -> dict[int, float]:
    """max S - min S of the base by prompt; prompts where all scores are equal are left out."""
    ranges = {}
    flat = []
    for idx, result in base.prompts.items():
        assert result.worst_score is not None, "a loaded run has a score for every prompt"
        width = best_score(result) - result.worst_score
        if width > MIN_RANGE:
            ranges[idx] = width
        else:
            flat.append(idx)
    if flat:
        LOG.warning(
            "%s: prompts with JSON_idx %s left out, all scores of the base are equal",
            *(base.name, brief(flat)),
        )
    return ranges


def paired(base: Run, run: Run, ranges: dict[int, float]) -> list[int]:
    """JSON_idx of the prompts that both runs have, with the same text; the others are named."""
    both = sorted(base.prompts.keys() & run.prompts.keys())
    for one, other in ((base, run), (run, base)):
        if missing := sorted(one.prompts.keys() - other.prompts.keys()):
            LOG.warning(
                "%s: lacks prompts that %s has, left out: JSON_idx %s",
                *(other.name, one.name, brief(missing)),
            )
    texts = {idx: (base.prompts[idx].prompt, run.prompts[idx].prompt) for idx in both}
    other = [
        idx for idx, (left, right) in texts.items() if None not in (left, right) and left != right
    ]
    if other:
        LOG.warning(
            "%s: prompts with JSON_idx %s are other texts than in %s, left out",
            *(run.name, brief(other), base.name),
        )
    return [idx for idx in both if idx in ranges and idx not in set(other)]


def brief(numbers: Sequence[int | str], limit: int = 12) -> str:
    """`1, 2, 3 and 97 more`."""
    head = ", ".join(str(number) for number in numbers[:limit])
    return head if len(numbers) <= limit else f"{head} and {len(numbers) - limit} more"


def compare(
    base: Run, runs: Sequence[Run], ranges: dict[int, float], weights: Weights
) -> Comparison | None:
    """A method (all its seeds) against the base. None where no prompt is in common.

    improvement = 100 (1 + mean of (max S - max S_base) / (max S_base - min S_base)); relative GPU
    compute = sum of seconds x GPUs, over the base's. Each seed counts the same for a prompt; a
    prompt counts once whatever its seeds.
    """
    values: dict[int, list[float]] = {}
    costs = []
    for run in runs:
        warn_of_settings(base, run)
        indices = paired(base, run, ranges)
        if not indices:
            LOG.warning("%s: no prompt in common with %s, left out", run.name, base.name)
            continue
        for idx in indices:
            gain = best_score(run.prompts[idx]) - best_score(base.prompts[idx])
            values.setdefault(idx, []).append(gain / ranges[idx])
        costs.append(_cost(base, run, indices, weights))
    if not costs:
        return None
    per_prompt = np.array([np.mean(gains) for _, gains in sorted(values.items())])
    mean = {key: _mean([cost[key] for cost in costs]) for key in costs[0] if key != "peak"}
    peaks = [cost["peak"] for cost in costs if cost["peak"] is not None]
    return Comparison(
        runs=list(runs),
        num_prompts=len(values),
        score=100 * (1 + float(per_prompt.mean())),
        interval=bootstrap(100 * (1 + per_prompt)),
        seconds=mean["seconds"],
        relative_time=mean["relative_time"],
        relative_gpu=mean["relative_gpu"],
        generation_sec=mean["generation"],
        reward_sec=mean["reward"],
        tokens_generated=mean["tokens_generated"],
        tokens_scored=mean["tokens_scored"],
        relative_tokens=mean["relative_tokens"],
        peak_memory_bytes=max(peaks, default=None),
    )


def warn_of_settings(base: Run, run: Run) -> None:
    """Names the settings that make the texts of two runs incomparable, where they differ."""
    left, right = (next(iter(of.prompts.values())).settings for of in (run, base))
    both = [
        {key: of[key] for key in SHARED_SETTINGS if None not in (left.get(key), right.get(key))}
        for of in (left, right)
    ]
    if differing := differences(*both):
        text = "%s was made with other settings than %s: %s"
        LOG.warning(text, run.name, base.name, ", ".join(differing))


def _cost(base: Run, run: Run, indices: Sequence[int], weights: Weights) -> dict[str, float | None]:
    """Sums over the paired prompts, beside the base's sums over the same prompts."""
    mine, its = ([of.prompts[idx] for idx in indices] for of in (run, base))
    seconds, base_seconds = (math.fsum(r.elapsed_sec for r in rows) for rows in (mine, its))
    gpu, base_gpu = (
        math.fsum(r.elapsed_sec * of.gpus_of(r) for r in rows)
        for of, rows in ((run, mine), (base, its))
    )
    tokens, base_tokens = token_cost(mine, weights), token_cost(its, weights)
    return {
        "seconds": seconds,
        "relative_time": _ratio(seconds, base_seconds),
        "relative_gpu": _ratio(gpu, base_gpu),
        "generation": math.fsum(r.generation_sec for r in mine),
        "reward": math.fsum(r.reward_sec for r in mine),
        "tokens_generated": _sum(r.tokens_generated for r in mine),
        "tokens_scored": _sum(r.tokens_scored for r in mine),
        "relative_tokens": None if None in (tokens, base_tokens) else _ratio(tokens, base_tokens),
        "peak": max(
            (r.peak_memory_bytes for r in mine if r.peak_memory_bytes is not None), default=None
        ),
    }


def token_cost(rows: Sequence[PromptResult], weights: Weights) -> float | None:
    """Generated and scored tokens, each x parameters; None where a file is silent."""
    generated, scored = _sum(r.tokens_generated for r in rows), _sum(r.tokens_scored for r in rows)
    if generated is None or scored is None:
        return None
    return generated * weights.generator + scored * weights.reward


def choose_weights(runs: Sequence[Run]) -> Weights:
    """The sizes that the plans name, if all agree; else every token weighs the same."""
    named = {
        (result.generator_params, result.reward_params)
        for run in runs
        for result in run.prompts.values()
        if result.generator_params and result.reward_params is not None
    }
    if len(named) > 1:
        LOG.warning(
            "%s: the files disagree about the models' sizes; tokens weigh the same", runs[0].pair
        )
    return Weights(*named.pop()) if len(named) == 1 else Weights(1, 1)


def bootstrap(values: np.ndarray) -> tuple[float, float] | None:
    """95 % percentile interval of the mean over prompts, fixed seed; None below two prompts."""
    if len(values) < 2:
        return None
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    means = np.empty(BOOTSTRAP_DRAWS)
    step = max(1, 2_000_000 // len(values))  # 16 MB a block
    for start in range(0, BOOTSTRAP_DRAWS, step):
        count = min(step, BOOTSTRAP_DRAWS - start)
        means[start : start + count] = rng.choice(values, (count, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def envelope(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Best-of-N points (compute, score), without those that cost more and score no better.

    A larger N can't truly be worse; where noise says so, the cheaper point that reached the score
    stands for it.
    """
    kept: list[tuple[float, float]] = []
    for compute, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if compute > 0 and (not kept or score > kept[-1][1]):
            kept.append((compute, score))
    return kept


def equal_score_compute(points: Sequence[tuple[float, float]], score: float) -> Bound | None:
    """What Best-of-N costs at a score: log compute is linear in score between neighbouring points.

    Above the best point it costs more than that point, below the first at most the first: bounds,
    never a value from the other end of the curve.
    """
    curve = envelope(points)
    if not curve:
        return None
    if score > curve[-1][1]:
        return Bound(curve[-1][0], ">=")
    if score < curve[0][1]:
        return Bound(curve[0][0], "<=")
    for (x0, y0), (x1, y1) in zip(curve, curve[1:], strict=False):
        if y0 <= score <= y1:
            share = (score - y0) / (y1 - y0)
            return Bound(math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))))
    return Bound(curve[-1][0])


def speedup(
    points: Sequence[tuple[float, float]], compute: float | None, score: float
) -> Bound | None:
    """How many times cheaper than Best-of-N at the same score."""
    reached = equal_score_compute(points, score)
    if reached is None or not compute:
        return None
    return Bound(reached.value / compute, reached.sign)


def add_speedups(comparisons: Sequence[Comparison]) -> None:
    """Speed-ups of every method that is not Best-of-N, by seconds x GPUs and by tokens."""
    best_of_n = [c for c in comparisons if c.run.method.kind == "Bo"]
    for axis in ("gpu", "tokens"):
        cost = attrgetter(f"relative_{axis}")
        curve = [(x, c.score) for c in best_of_n if (x := cost(c)) is not None]
        for c in comparisons:
            if c.run.method.kind != "Bo":
                setattr(c, f"speedup_{axis}", speedup(curve, cost(c), c.score))


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def spearman(left: np.ndarray, right: np.ndarray) -> float | None:
    """Rank correlation; None with fewer than three pairs or a constant side."""
    if len(left) < 3:
        return None
    a, b = ranks(left), ranks(right)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ratio(value: float, base: float) -> float:
    return value / base if base > 0 else math.nan


def _sum(values: Iterable[int | None]) -> float | None:
    found = list(values)
    return None if None in found else float(sum(found))


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else float(np.mean(values))
