"""Do early scores tell the final ones? Partial against final score, rank correlation by length.

From `rounds` (and `partials`, of Best-of-N with --log_partial): the score that a candidate had when
its text was cut off at a stop, against the score of its finished text. Spearman within a prompt and
process, averaged over prompts; lengths are gathered by octaves. Only candidates that were finished
have a final score: under rejection these are the survivors, which makes the correlation look
smaller than it is among all; runs that reject nothing (alpha 0, or Best-of-N that logs partial
scores) show it whole. Writes imgs/partial_<pair>.png, .pdf and .csv and prints the table. Exit
codes: 0 drawn; 1 no data; 2 no runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess import pictures
from postprocess.command import EXIT_OK, LOG, Refused, csv_text, guarded, parser, table, write_text
from postprocess.reading import answers_of, load_objects, shown
from postprocess.rounds import partials_of, rounds_of
from postprocess.runs import Run, by_pair, load_runs
from postprocess.stats import bootstrap, spearman

MAX_DOTS = 2000


@dataclass(slots=True)
class Bin:
    """Everything at about one length."""

    lengths: list[int] = field(default_factory=list)
    by_prompt: dict[int, list[float]] = field(default_factory=dict)
    dots: list[tuple[float, float]] = field(default_factory=list)
    num_pairs: int = 0

    @property
    def length(self) -> int:
        return int(np.median(self.lengths))

    @property
    def correlations(self) -> np.ndarray:
        return np.array([np.mean(values) for _, values in sorted(self.by_prompt.items())])


def collect(runs: Iterable[Run]) -> dict[int, Bin]:
    """Pairs of partial and final score by length; dots are on their prompt's scale."""
    bins: dict[int, Bin] = {}
    for run in runs:
        for idx, result in run.prompts.items():
            objects = load_objects(result.path)
            for item in objects:
                try:
                    rounds, partials = rounds_of(item), partials_of(item)
                except ValueError as error:
                    LOG.warning("%s: left out, %s", shown(result.path.name), error)
                    continue
                final = {
                    answer.candidate: answer.score
                    for answer in answers_of([item])
                    if "candidate" in item["trajectories"][0]
                }
                for current in (r for r in rounds if not r.final):
                    _add(bins, idx, current.stop_length, current.scores, final)
                for length, scores in partials.items():
                    _add(bins, idx, length, scores, final)
    return bins


def _add(
    bins: dict[int, Bin], idx: int, length: int, partial: dict[int, float], final: dict[int, float]
) -> None:
    both = sorted(partial.keys() & final.keys())
    if length < 1 or len(both) < 3:
        return
    early, late = np.array([partial[c] for c in both]), np.array([final[c] for c in both])
    rank = spearman(early, late)
    if rank is None:
        return
    place = bins.setdefault(round(math.log2(length)), Bin())
    place.lengths.append(length)
    place.by_prompt.setdefault(idx, []).append(rank)
    place.num_pairs += len(both)
    scale = late.std()
    place.dots += [
        ((e - late.mean()) / scale, (f - late.mean()) / scale)
        for e, f in zip(early, late, strict=True)
    ]


def rows_of(bins: dict[int, Bin]) -> list[list]:
    """length, prompts, pairs, correlation, low, high."""
    rows = []
    for _, found in sorted(bins.items()):
        low, high = bootstrap(found.correlations) or (None, None)
        mean = float(found.correlations.mean())
        rows.append([found.length, len(found.by_prompt), found.num_pairs, mean, low, high])
    return rows


def draw(pair: str, bins: dict[int, Bin], rows: list[list], args: argparse.Namespace) -> list[Path]:
    plt = pictures.start(args.show)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    every = [found for _, found in sorted(bins.items())]
    lengths = [found.length for found in every]
    chosen = every if len(every) <= 3 else [every[0], every[len(every) // 2], every[-1]]
    for color, found in zip(pictures.CYCLE, chosen, strict=False):
        dots = found.dots
        step = math.ceil(len(dots) / MAX_DOTS)
        x, y = zip(*dots[::step], strict=True)
        size = 4 if len(x) > 100 else 8
        left.plot(
            x, y, ".", color=color, alpha=0.5, markersize=size, label=f"about {found.length} tokens"
        )
    early = [x for found in chosen for x, _ in found.dots]
    low, high = np.percentile(early, [0.5, 99.5])
    left.set_xlim(low - 0.5, high + 0.5)  # a few wild early scores would squeeze the rest
    left.set_xlabel("score of the text so far")
    left.set_ylabel("final score")
    left.set_title("each prompt's scores on the scale of its final scores", fontsize=10)
    legend = left.legend(framealpha=0.85, edgecolor="none")
    for handle in legend.legend_handles:
        handle.set(markersize=9, alpha=1)
    middle = [row[3] for row in rows]
    errors = [
        [
            m - (low if low is not None else m)
            for m, low in zip(middle, [r[4] for r in rows], strict=True)
        ]
    ]
    errors.append(
        [
            (high if high is not None else m) - m
            for m, high in zip(middle, [r[5] for r in rows], strict=True)
        ]
    )
    right.errorbar(lengths, middle, errors, fmt="o-", color=pictures.CYCLE[0], capsize=3)
    pictures.log_axis(right, lengths)
    right.set_ylim(min(0, *middle, *(row[4] or 0 for row in rows)) - 0.05, 1.05)
    right.set_xlabel("length of the text so far, tokens")
    right.set_ylabel("rank correlation with the final score")
    right.set_title("mean over prompts, 95 % interval", fontsize=10)
    figure.suptitle(args.title or pair.replace("_", " with "))
    figure.tight_layout(w_pad=2.5)
    return pictures.save(figure, args.out, f"partial_{pair}", args.show)


def work(args: argparse.Namespace) -> int:
    """All files are written before anything is printed: a pipe that closes early costs none."""
    said: list[object] = []
    for pair, runs in by_pair(load_runs(args.places)).items():
        bins = collect(runs)
        if not bins:
            LOG.warning("%s: no rounds with three or more finished candidates", pair)
            continue
        rows = rows_of(bins)
        header = ["length", "prompts", "pairs", "rank_correlation", "low", "high"]
        cells = [
            ["-" if c is None else f"{c:.3f}" if isinstance(c, float) else c for c in row]
            for row in rows
        ]
        said += [f"\n{pair}: partial against final score\n{table(header, cells)}"]
        write_text(args.out / f"partial_{pair}.csv", csv_text(header, rows))
        said += draw(pair, bins, rows, args)
    if not said:
        raise Refused("no run has rounds with partial scores; the paper's files have none")
    print(*said, sep="\n")
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    pictures.add_options(made)
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
