"""The table of the early rejection experiment: reward, cost, and saving, with intervals.

Only prompts that have the pool and every configuration count. Intervals are 95 % bootstraps over
prompts. The saving at equal reward is what Best-of-n costs at the n where its mean z equals the
configuration's, over the configuration's cost; above the pool's best it is at least the whole
pool's cost over the configuration's, marked >=. A `family` is a configuration at several numbers of
rows: its cost at Best-of-N's reward is interpolated between them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from postprocess.pool import cost_at

DRAWS = 2000
POOL = "pool"
HEADER = ("configuration", "z", "N_eq", "tokens", "generated", "scored", "seconds", "saving at "
          "equal z", "pool's tokens / its", "length", "perplexity")  # fmt: skip

Line = dict[str, Any]


def summarise(lines: Sequence[Line], names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """A table, and the same as numbers."""
    by_prompt: dict[int, dict[str, Line]] = defaultdict(dict)
    for line in lines:
        by_prompt[line["JSON_idx"]][line["config"]] = line
    whole = [found for found in by_prompt.values() if all(name in found for name in names)]
    if not whole:
        return "no prompt has the pool and every configuration", {"num_prompts": 0}
    sizes = sorted(set.intersection(*({int(n) for n in p[POOL]["best_of"]} for p in whole)))
    shown = [n for n in sizes if n in (16, 64, 256, 1024) or n == sizes[-1]]
    best_of = _best_of_rows(whole, shown)
    searched = [_config_row(whole, name, sizes) for name in names if name != POOL]
    families = _families(searched, best_of[-1])
    rows = best_of + searched
    curve = [{k: r[k] for k in ("n", "z", "n_eq", "tokens")} for r in _best_of_rows(whole, sizes)]
    numbers = {"num_prompts": len(whole), "rows": rows, "families": families, "curve": curve}
    return _text(rows, families, len(whole)), numbers


def _best_of_rows(prompts: Sequence[dict[str, Line]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    return [_best_of_row(prompts, n) for n in sizes]


def _best_of_row(prompts: Sequence[dict[str, Line]], n: int) -> dict[str, Any]:
    z, log_n = np.asarray([p[POOL]["best_of"][str(n)] for p in prompts]).T
    whole = all(p[POOL]["n"] == n for p in prompts)
    timed = whole and not any(p[POOL]["logged"] for p in prompts)
    return {
        "name": f"Best-of-{n}",
        "n": n,
        "z": float(z.mean()),
        "z_interval": _interval(z),
        "n_eq": math.exp(log_n.mean()),
        "n_eq_interval": [math.exp(x) for x in _interval(log_n)],
        "generated": float(np.mean([n * p[POOL]["mean_tokens"] for p in prompts])),
        "scored": float(np.mean([_best_of_scored(p[POOL], n) for p in prompts])),
        "seconds": float(np.mean([_seconds(p[POOL]) for p in prompts])) if timed else None,
        "best_tokens": _mean(prompts, POOL, "best_tokens") if whole else None,
        "perplexity": _mean(prompts, POOL, "best_perplexity") if whole else None,
        "tokens": float(_best_of_tokens(prompts, n).mean()),
    }


def _config_row(
    prompts: Sequence[dict[str, Line]], name: str, sizes: Sequence[int]
) -> dict[str, Any]:
    z = np.asarray([p[name]["z"] for p in prompts])
    log_n = np.asarray([p[name]["log_n_eq"] for p in prompts])
    tokens = np.asarray([_tokens(p[name]) for p in prompts])
    curve = np.asarray([[p[POOL]["best_of"][str(n)][0] for n in sizes] for p in prompts])
    costs = np.stack([_best_of_tokens(prompts, n) for n in sizes], axis=1)
    saving, bound = _saving(z, tokens, curve, costs)
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(z), (DRAWS, len(z)))
    drawn = [_saving(z[d], tokens[d], curve[d], costs[d])[0] for d in draws]
    difference = z - curve[:, -1]
    return {
        "name": name,
        "z": float(z.mean()),
        "z_interval": _interval(z),
        "z_above_whole_pool": float(difference.mean()),
        "z_above_whole_pool_interval": _interval(difference),
        "n_eq": math.exp(log_n.mean()),
        "n_eq_interval": [math.exp(x) for x in _interval(log_n)],
        "tokens": float(tokens.mean()),
        "generated": _mean(prompts, name, "tokens_generated"),
        "scored": _mean(prompts, name, "tokens_scored"),
        "seconds": float(np.mean([_seconds(p[name]) for p in prompts])),
        "best_tokens": _mean(prompts, name, "best_tokens"),
        "perplexity": _mean(prompts, name, "best_perplexity"),
        "saving": saving,
        "saving_sign": bound,
        "saving_interval": np.percentile(drawn, [2.5, 97.5]).tolist(),
        "pool_over_its_tokens": float(costs[:, -1].mean() / tokens.mean()),
    }


def _saving(
    z: np.ndarray, tokens: np.ndarray, curve: np.ndarray, costs: np.ndarray
) -> tuple[float, str]:
    """Best-of-n's tokens at the same mean z, over the configuration's."""
    points = list(zip(costs.mean(axis=0).tolist(), curve.mean(axis=0).tolist(), strict=True))
    equal = cost_at(points, float(z.mean()))
    if equal is not None:
        return equal / float(tokens.mean()), ""
    above = z.mean() > points[-1][1]
    return points[-1 if above else 0][0] / float(tokens.mean()), ">=" if above else "<="


def _families(rows: Sequence[dict[str, Any]], pool: dict[str, Any]) -> list[dict[str, Any]]:
    """Configurations that differ in their rows alone: tokens and seconds at the pool's reward."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[re.sub(r"rows=\d+ ?", "", row["name"])].append(row)
    families = []
    for name, members in found.items():
        entry: dict[str, Any] = {"name": name}
        for cost in ("tokens", "seconds"):
            at = cost_at([(row[cost], row["z"]) for row in members], pool["z"])
            if at is not None and pool[cost] is not None:
                entry[cost] = at
                entry[f"{cost}_saved"] = pool[cost] / at
        if len(entry) > 1:
            families.append(entry)
    return families


def _tokens(line: Line) -> int:
    return line["tokens_generated"] + line["tokens_scored"]


def _best_of_scored(pool: Line, n: int) -> float:
    """Each answer is read once, with a template's end behind it; the prompt once."""
    if pool["logged"]:
        return (
            n * pool["mean_tokens"]
        )  # without the prompt and the ends, which the log does not say
    return pool["tokens_scored"] * n / pool["n"]


def _best_of_tokens(prompts: Sequence[dict[str, Line]], n: int) -> np.ndarray:
    return np.asarray([n * p[POOL]["mean_tokens"] + _best_of_scored(p[POOL], n) for p in prompts])


def _seconds(line: Line) -> float:
    return line["generation_sec"] + line["reward_sec"]


def _mean(prompts: Sequence[dict[str, Line]], name: str, key: str) -> float:
    return float(np.mean([p[name][key] for p in prompts]))


def _interval(values: np.ndarray) -> list[float]:
    rng = np.random.default_rng(0)
    means = rng.choice(values, (DRAWS, len(values))).mean(axis=1)
    return np.percentile(means, [2.5, 97.5]).tolist()


def _text(
    rows: Sequence[dict[str, Any]], families: Sequence[dict[str, Any]], num_prompts: int
) -> str:
    from postprocess.command import table

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    cells = []
    for row in rows:
        low, high = row["n_eq_interval"]
        saving = ""
        if "saving" in row:
            a, b = row["saving_interval"]
            saving = f"{row['saving_sign']}{row['saving']:.2f} [{a:.2f}, {b:.2f}]"
        cells.append(
            (
                row["name"],
                f"{row['z']:.3f}",
                f"{row['n_eq']:.0f} [{low:.0f}, {high:.0f}]",
                f"{row['tokens']:.0f}",
                f"{row['generated']:.0f}",
                f"{row['scored']:.0f}",
                number(row["seconds"], ".2f"),
                saving,
                number(row.get("pool_over_its_tokens"), ".2f"),
                number(row["best_tokens"], ".0f"),
                number(row["perplexity"], ".2f"),
            )
        )
    lines = [f"{num_prompts} prompts, 95 % intervals over prompts", table(HEADER, cells)]
    for family in families:
        parts = [
            f"{family[cost]:.4g} {cost}, {family[f'{cost}_saved']:.2f} times fewer"
            for cost in ("tokens", "seconds")
            if cost in family
        ]
        lines.append(f"at the whole pool's reward, {family['name']}: {'; '.join(parts)}")
    return "\n".join(lines)
