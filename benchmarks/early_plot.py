"""Draws the early rejection experiment: reward against tokens, beside Best-of-N's curve.

Reads results.jsonl of benchmarks/early_rejection.py; writes early_rejection.png and .pdf and prints
the table. Configurations are numbered in the picture and named in its legend.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.early_summary import POOL, summarise
from postprocess import pictures
from postprocess.command import guarded
from suite.files import json_lines


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("results", type=Path, metavar="RESULTS.JSONL")
    made.add_argument("--config", action="append", metavar="TEXT", help="only these")
    pictures.add_options(made)
    return guarded(work, made.parse_args(argv))


def work(args: argparse.Namespace) -> int:
    """The pictures are written before anything is printed: a closed pipe does not cost them."""
    lines = json_lines(args.results)
    found = dict.fromkeys(line["config"] for line in lines if line.get("config") != POOL)
    names = [POOL, *(args.config or found)]
    text, numbers = summarise(lines, names)
    paths = draw(numbers, args) if numbers["num_prompts"] else []
    print(text, *paths, sep="\n")
    return 0 if paths else 1


def draw(numbers: dict[str, Any], args: argparse.Namespace) -> list[Path]:
    plt = pictures.start(args.show)
    figure, axes = plt.subplots(figsize=(8, 5))
    curve = numbers["curve"]
    color, marker = pictures.STYLES["Bo"]
    tokens = [row["tokens"] for row in curve]
    axes.plot(tokens, [row["n_eq"] for row in curve], color=color, label="Best-of-N")
    marked = [row for row in curve if row["n"] & (row["n"] - 1) == 0 and row["n"] >= 8]
    points = [(row["tokens"], row["n_eq"]) for row in marked]
    axes.plot(*zip(*points, strict=True), marker, color=color)
    labels, colors = [f"N = {row['n']}" for row in marked], [color] * len(marked)
    searched = [row for row in numbers["rows"] if "n" not in row]
    for number, row in enumerate(searched, start=1):
        color, marker = pictures.STYLES["SpRF" if "refill" in row["name"].split() else "SpR"]
        low, high = row["n_eq_interval"]
        error = [[row["n_eq"] - low], [high - row["n_eq"]]]
        axes.errorbar(
            row["tokens"], row["n_eq"], yerr=error, fmt=marker, color=color, capsize=2,
            label=f"{number}: {row['name']}",
        )  # fmt: skip
        points.append((row["tokens"], row["n_eq"]))
        labels.append(str(number))
        colors.append(color)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    pictures.log_axis(axes, [*tokens, *(row["tokens"] for row in searched)])
    axes.set_xlabel("tokens a prompt: generated and read by the reward model")
    axes.set_ylabel("equivalent N (geometric mean)")
    title = f"{numbers['num_prompts']} prompts, 95 % intervals over prompts"
    axes.set_title(args.title or title, fontsize=10)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.13))
    pictures.place_labels(axes, points, labels, colors)
    return pictures.save(figure, args.out, "early_rejection", args.show)


if __name__ == "__main__":
    sys.exit(main())
