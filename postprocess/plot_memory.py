"""The paper's saw-tooth: rows and KV bytes over the length of the answers, for one prompt of a run.

Rows live at each rejection and KV bytes are from `rounds`. Between rejections the cache is drawn
as growing evenly: a row that finishes frees its memory at once, which files do not log by step.
The last stretch, after the last rejection, is worked out from the rows kept and the longest
answer, and is dashed. Writes imgs/memory_<run>_prompt_<n>.png and .pdf.

Exit codes: 0 drawn; 1 no rounds there; 2 no runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess import pictures
from postprocess.reading import BadFile, load_objects, shown
from postprocess.rounds import Round, rounds_of
from postprocess.runs import EXIT_OK, EXIT_WRONG, LOG, Refused, Run, guarded, load_runs, parser

GIB = 2**30


def teeth(
    rounds: Sequence[Round], last_length: int
) -> tuple[list[tuple[float, float, float]], int]:
    """Corners (length, rows, KV bytes) of the saw-tooth, and how many of them are measured.

    A rejection has two corners at one length, before and after; after it, the kept rows' share.
    """
    corners: list[tuple[float, float, float]] = [(0, rounds[0].rows, 0)]
    a_token = 0.0
    for position, current in enumerate(rounds):
        alive = current.num_scored or current.rows
        corners.append((current.stop_length, alive, current.kv_bytes))
        if alive and current.stop_length:
            a_token = current.kv_bytes / alive / current.stop_length
        later = rounds[position + 1 :]
        rows = later[0].rows if later else min(current.kept, alive)
        corners.append((current.stop_length, rows, rows * current.stop_length * a_token))
    measured = len(corners)
    length, rows, _ = corners[-1]
    if rows and last_length > length:
        corners.append((last_length, rows, rows * last_length * a_token))
    return corners, measured


def longest_answer(item: dict[str, Any]) -> int:
    lengths = [row.get("num_tokens") for row in item["trajectories"]]
    return max((n for n in lengths if isinstance(n, int) and not isinstance(n, bool)), default=0)


def find_prompt(run: Run, wanted: int | None) -> tuple[int, dict[str, Any], list[Round]] | None:
    """The first prompt (or the wanted one) whose slowest process has rounds."""
    for idx in [wanted] if wanted is not None else run.prompts:
        if idx not in run.prompts:
            return None
        for item in load_objects(run.prompts[idx].path):
            try:
                rounds = rounds_of(item)
            except ValueError as error:
                raise BadFile(f"{shown(run.prompts[idx].path.name)}: {error}") from error
            if rounds:
                return idx, item, rounds
    return None


def draw(
    run: Run, idx: int, item: dict[str, Any], rounds: list[Round], args: argparse.Namespace
) -> list[Path]:
    plt = pictures.start(args.show)
    corners, measured = teeth(rounds, longest_answer(item))
    lengths, rows, used = (list(column) for column in zip(*corners, strict=True))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5.2), sharex=True)
    parts = [(slice(0, measured), "-"), (slice(measured - 1, None), "--")]
    for part, style in parts:
        top.plot(lengths[part], rows[part], style, color=pictures.CYCLE[0])
        bottom.plot(lengths[part], [b / GIB for b in used[part]], style, color=pictures.CYCLE[1])
    top.set_yscale("log")
    top.set_ylabel("rows")
    before = [r.num_scored or r.rows for r in rounds]
    for current, alive in zip(rounds, before, strict=True):
        top.annotate(
            f"{alive}", (current.stop_length, alive), (3, 3), textcoords="offset points", fontsize=8
        )
    reward = [r.reward_kv_bytes for r in rounds]
    if any(reward):
        spots = [r.stop_length for r in rounds]
        label = "reward model's cache at the rejections"
        bottom.plot(spots, [b / GIB for b in reward], "^", color=pictures.CYCLE[2], label=label)
        bottom.legend(frameon=False)
    bottom.set_ylabel("generator's KV cache, GiB")
    bottom.set_xlabel("answer length, tokens")
    bottom.set_ylim(bottom=0)
    top.set_title(
        args.title or f"{run.method.name}, {run.llm} with {run.reward}, prompt {idx}", fontsize=10
    )
    figure.tight_layout()
    return pictures.save(figure, args.out, f"memory_{run.name}_prompt_{idx}", args.show)


def work(args: argparse.Namespace) -> int:
        drawn, code = 0, EXIT_OK
    done: set[tuple[str, str]] = set()
    for run in load_runs(args.places):
        if (run.pair, run.method.name) in done:
            continue  # one seed a method
        try:
            found = find_prompt(run, args.prompt)
        except BadFile as error:
            LOG.error("%s", error)
            code = EXIT_WRONG
            continue
        if found is None:
            continue
        drawn += 1
        done.add((run.pair, run.method.name))
        for path in draw(run, *found, args):
            print(path)
    if not drawn:
        which = "" if args.prompt is None else f" for prompt {args.prompt}"
        raise Refused(f"no run has rounds{which}; the paper's files have none")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument(
        "--prompt", type=int, metavar="JSON_idx", help="default: a run's first with rounds"
    )
    pictures.add_options(made)
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
