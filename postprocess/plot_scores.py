"""The scores of one prompt: how the largest Best-of-N spreads, where each run's best answer lies.

Each candidate counts once, also in the paper's files, which may record a finished one in every
round. Writes imgs/scores_<pair>_prompt_<n>.png and .pdf. Exit codes: 0 drawn; 1 nothing to draw;
2 no runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess import pictures
from postprocess.command import EXIT_OK, LOG, Refused, guarded, parser
from postprocess.reading import answers_of, load_objects, shown
from postprocess.runs import Run, by_pair, choose_base, load_runs


def scores_of(run: Run, idx: int) -> np.ndarray:
    """The finite scores of a prompt, each candidate once."""
    objects = load_objects(run.prompts[idx].path)
    seen: dict[tuple, float] = {}
    for answer in answers_of(objects):
        named = "candidate" in objects[answer.object_index]["trajectories"][0]
        mark = answer.candidate if named else (answer.output, answer.score)
        seen[answer.object_index, mark] = answer.score
    return np.array(list(seen.values()))


def draw(base: Run, runs: Sequence[Run], idx: int, args: argparse.Namespace) -> list[Path]:
    plt = pictures.start(args.show)
    scores = scores_of(base, idx)
    figure, (top, bottom) = plt.subplots(
        2,
        1,
        figsize=(7, 3.2 + 0.26 * len(runs)),
        sharex=True,
        height_ratios=[8, 1 + 0.9 * len(runs)],
    )
    bins = min(60, max(5, int(2 * len(scores) ** 0.5)))
    top.hist(scores, bins=bins, color=pictures.STYLES["Bo"][0], alpha=0.7)
    top.set_ylabel("candidates")
    top.set_title(args.title or f"{base.pair.replace('_', ' with ')}, prompt {idx}", fontsize=10)
    top.annotate(
        f"{base.method.name}, {len(scores)} candidates",
        (0.01, 0.92),
        xycoords="axes fraction",
        fontsize=8,
    )
    for place, run in enumerate(runs):
        color, marker = pictures.STYLES[run.method.kind]
        best = run.prompts[idx].best
        assert best is not None, "a loaded run has a winner for every prompt"
        bottom.plot([best.score], [place], marker, color=color)
        bottom.annotate(
            f"{best.score:.2f}",
            (best.score, place),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    bottom.set_yticks(
        range(len(runs)), [f"{run.method.name}, seed {run.seed}" for run in runs], fontsize=8
    )
    bottom.set_ylim(len(runs) - 0.4, -0.6)
    bottom.margins(x=0.08)
    bottom.set_xlabel("score; below: the best answer of each run")
    figure.tight_layout()
    return pictures.save(figure, args.out, f"scores_{base.pair}_prompt_{idx}", args.show)


def work(args: argparse.Namespace) -> int:
    paths: list[Path] = []
    for pair, runs in by_pair(load_runs(args.places)).items():
        try:
            base = choose_base(runs, args.base)
        except Refused as error:
            LOG.warning("%s", shown(error, 300))
            continue
        idx = args.prompt if args.prompt is not None else min(base.prompts)
        if idx not in base.prompts:
            LOG.warning("%s: no prompt %d in %s", pair, idx, base.name)
            continue
        paths += draw(base, [run for run in runs if idx in run.prompts], idx, args)
    if not paths:
        raise Refused("nothing to draw")
    print(*paths, sep="\n")  # last: a pipe that closes early costs no picture
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument(
        "--prompt", type=int, metavar="JSON_idx", help="default: the first of the base"
    )
    made.add_argument(
        "--base", help="run whose scores are spread out (default: the largest Best-of-N)"
    )
    pictures.add_options(made)
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
