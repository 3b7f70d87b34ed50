"""Was it worth it? Improvement score against relative compute, for each model pair in archive/.

Writes imgs/<generator>_<reward>.png, .pdf and .csv and prints the table. The base is the largest
Best-of-N (--base names another); every method is compared with it over the prompts that both
have. Seconds: a prompt's time is that of its slowest process, GPUs are the processes, so relative
GPU compute = (sum of seconds x GPUs) / the base's. Second panel: generated and scored tokens,
weighted by the models' parameters, the axis that owes nothing to how rows were packed. Speed-up:
what Best-of-N costs at the same score (log interpolation) over what the method costs; ">=" beyond
the best Best-of-N point, "<=" below the first.

Exit codes: 0 drawn; 1 nothing could be compared for a pair; 2 no runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess import pictures
from postprocess.command import (
    EXIT_OK,
    EXIT_WRONG,
    LOG,
    Refused,
    csv_text,
    guarded,
    parser,
    table,
    write_text,
)
from postprocess.reading import shown
from postprocess.runs import Run, by_pair, choose_base, load_runs, one_of_each
from postprocess.stats import (
    Comparison,
    Weights,
    add_speedups,
    choose_weights,
    compare,
    score_ranges,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    *("method", "N_or_alpha", "seeds", "gpus", "prompts", "score", "score_low", "score_high"),
    *("seconds", "relative_time", "relative_gpu_compute", "generation_sec", "reward_sec"),
    *("tokens_generated", "tokens_scored", "relative_tokens", "peak_memory_bytes"),
    *("speedup_gpu", "speedup_gpu_bound", "speedup_tokens", "speedup_tokens_bound"),
)


def compare_pair(runs: Sequence[Run], base: Run, weights: Weights) -> list[Comparison]:
    """Every method against the base; seeds of a method are averaged, the base stands alone."""
    ranges = score_ranges(base)
    if not ranges:
        raise Refused(f"{base.name}: nothing can be scaled, in no prompt do the scores differ")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run is base or run.method != base.method:
            groups.setdefault(run.method.name, []).append(run)
    found = [compare(base, group, ranges, weights) for group in groups.values()]
    comparisons = [comparison for comparison in found if comparison is not None]
    if len({comparison.num_prompts for comparison in comparisons}) > 1:
        LOG.warning(
            "%s: the methods do not have the same prompts; their scores are not quite alike",
            base.pair,
        )
    add_speedups(comparisons)
    return comparisons


def table_text(comparisons: Sequence[Comparison]) -> str:
    header = [
        "method",
        "runs",
        "GPUs",
        "prompts",
        "score",
        "95 %",
        "seconds",
        "time",
        "GPU",
        "gen s",
        "reward s",
    ]
    header += ["tok gen", "tok scored", "tokens", "peak GiB", "speed-up", "in tokens"]
    rows = []
    for c in comparisons:
        interval = "-" if c.interval is None else f"{c.interval[0]:.1f} to {c.interval[1]:.1f}"
        peak = None if c.peak_memory_bytes is None else c.peak_memory_bytes / 2**30
        rows.append(
            [
                *(
                    c.run.method.name,
                    len(c.runs),
                    c.run.num_gpus,
                    c.num_prompts,
                    f"{c.score:.2f}",
                    interval,
                ),
                *(_text(c.seconds, ".1f"), _text(c.relative_time), _text(c.relative_gpu)),
                *(_text(c.generation_sec, ".1f"), _text(c.reward_sec, ".1f")),
                *(
                    _text(c.tokens_generated, ".0f"),
                    _text(c.tokens_scored, ".0f"),
                    _text(c.relative_tokens),
                ),
                *(_text(peak, ".2f"), c.speedup_gpu or "-", c.speedup_tokens or "-"),
            ]
        )
    return table(header, rows)


def csv_rows(comparisons: Sequence[Comparison]) -> Iterable[list[object]]:
    """One row a method, in the order of COLUMNS."""
    for c in comparisons:
        low, high = c.interval or (None, None)
        cells = [
            *(c.run.method.name, c.run.method.label, " ".join(str(run.seed) for run in c.runs)),
            *(c.run.num_gpus, c.num_prompts, c.score, low, high),
            *(c.seconds, c.relative_time, c.relative_gpu, c.generation_sec, c.reward_sec),
            *(c.tokens_generated, c.tokens_scored, c.relative_tokens, c.peak_memory_bytes),
        ]
        for bound in (c.speedup_gpu, c.speedup_tokens):
            cells += [None, None] if bound is None else [bound.value, bound.sign or "="]
        yield cells


def draw(
    comparisons: Sequence[Comparison], title: str, weights: Weights, args: argparse.Namespace
) -> list[Path]:
    """One panel by seconds, a second by tokens where the files count them."""
    plt = pictures.start(args.show)
    by_tokens = [c for c in comparisons if c.relative_tokens is not None and c.relative_tokens > 0]
    panels = [("relative_gpu", "relative GPU compute (seconds x GPUs)", comparisons)]
    if len(by_tokens) > 1:
        unit = "weighted equally" if weights.equal else "weighted by parameters"
        panels.append(
            ("relative_tokens", f"relative tokens (generated + scored, {unit})", by_tokens)
        )
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6.2 * len(panels), 5.4), squeeze=False, sharey=True
    )
    for ax, (field, label, shown_here) in zip(axes[0], panels, strict=True):
        _draw_panel(ax, [c for c in shown_here if (getattr(c, field) or 0) > 0], field)
        ax.set_xlabel(label)
    axes[0][0].set_ylabel("improvement score (base = 100)")
    figure.suptitle(title)
    figure.tight_layout()
    for ax, (field, _, shown_here) in zip(axes[0], panels, strict=True):
        _label_panel(ax, [c for c in shown_here if (getattr(c, field) or 0) > 0], field)
    return pictures.save(figure, args.out, comparisons[0].run.pair, args.show)


def _draw_panel(ax: Axes, comparisons: Sequence[Comparison], field: str) -> None:
    for kind, (color, marker) in pictures.STYLES.items():
        rows = [c for c in comparisons if c.run.method.kind == kind]  # by N or alpha
        if not rows:
            continue
        x, y = [getattr(c, field) for c in rows], [c.score for c in rows]
        around = [c.interval or (c.score, c.score) for c in rows]
        errors = [[max(s - low, 0) for s, (low, _) in zip(y, around, strict=True)]]
        errors.append([max(high - s, 0) for s, (_, high) in zip(y, around, strict=True)])
        ax.errorbar(x, y, errors, fmt="none", ecolor=color, alpha=0.35, capsize=2)
        ax.plot(x, y, marker=marker, color=color, linestyle="--", label=_series(kind, rows))
    if comparisons:
        pictures.log_axis(ax, [getattr(c, field) for c in comparisons])
        ax.legend(loc="best", frameon=False)


def _series(kind: str, rows: Sequence[Comparison]) -> str:
    """In the legend, with what all points of the kind share: it need not stand beside each."""
    name = pictures.NAMES[kind] + _shared_extra(rows).replace("_", ", ")
    return name if kind == "Bo" else f"{name}, by α"


def _shared_extra(rows: Sequence[Comparison]) -> str:
    extras = {c.run.method.extra for c in rows}
    return extras.pop() if len(extras) == 1 else ""


def _label_panel(ax: Axes, comparisons: Sequence[Comparison], field: str) -> None:
    shared = {
        kind: _shared_extra([c for c in comparisons if c.run.method.kind == kind]).replace("_", " ")
        for kind in pictures.STYLES
    }
    labels = [
        ("N = " if c.run.method.kind == "Bo" else "")
        + c.run.method.label.removesuffix(shared[c.run.method.kind])
        for c in comparisons
    ]
    colors = [pictures.STYLES[c.run.method.kind][0] for c in comparisons]
    pictures.place_labels(ax, [(getattr(c, field), c.score) for c in comparisons], labels, colors)


def _text(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None or math.isnan(value) else f"{value:{form}}"


def work(args: argparse.Namespace) -> int:
    """All files are written before anything is printed: a pipe that closes early costs none."""
    said: list[object] = []
    found = load_runs(args.places)
    kept = one_of_each(found, args.base)
    code = EXIT_OK if len(kept) == len(found) else EXIT_WRONG
    for pair, runs in by_pair(kept).items():
        try:
            chosen = _chosen(runs, args.methods)
            base = choose_base(runs, args.base)
            weights = choose_weights(runs)
            comparisons = compare_pair(
                [*chosen, *([] if base in chosen else [base])], base, weights
            )
        except Refused as error:
            LOG.error("%s", error)
            code = EXIT_WRONG
            continue
        if sum(c.run.method.kind == "Bo" for c in comparisons) < 2:
            LOG.warning("%s: one Best-of-N point; speed-ups are bounds", pair)
        said += [f"\n{pair}: against {base.name}, {len(base.prompts)} prompts"]
        said += [table_text(comparisons)]
        if weights.equal:
            said += ["Tokens are weighted equally: the files do not tell the models' sizes."]
        write_text(args.out / f"{pair}.csv", csv_text(COLUMNS, csv_rows(comparisons)))
        title = args.title or f"{runs[0].llm} with {runs[0].reward}"
        said += draw(comparisons, title, weights, args)
    print(*said, sep="\n", end="\n" if said else "")
    return code


def _chosen(runs: Sequence[Run], names: Sequence[str] | None) -> list[Run]:
    if not names:
        return list(runs)
    chosen = [run for run in runs if run.method.name in names or run.method.kind in names]
    if not chosen:
        there = ", ".join(sorted({run.method.name for run in runs}))
        raise Refused(
            f"{runs[0].pair}: none of --methods {shown(' '.join(names))}; there is {there}"
        )
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument(
        "--base", help="method, run or folder to compare with (default: the largest Best-of-N)"
    )
    made.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="only these: Bo120, SpR_alpha_0.5, or Bo, SpR, SpRF",
    )
    pictures.add_options(made)
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
