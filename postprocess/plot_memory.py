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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess import pictures
from postprocess.command import EXIT_OK, EXIT_WRONG, LOG, Refused, guarded, parser
from postprocess.reading import BadFile, count_of, load_objects, shown
from postprocess.rounds import Round, rounds_of
from postprocess.runs import Run, load_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


@dataclass(frozen=True, slots=True)
class Teeth:
    """Corners (length, rows, KV bytes); those from `measured` on are worked out."""

    corners: list[tuple[float, float, float]]
    measured: int


def teeth(item: dict[str, Any], rounds: Sequence[Round]) -> Teeth:
    """A rejection has two corners at one length, before and after it.

    Rows at the start are all candidates there are; rows after a rejection are the live ones less
    those of them that `rejected` names; their bytes are their share of what was in use.
    """
    rejected = rejected_by_round(item)
    corners: list[tuple[float, float, float]] = [(0, rows_at_start(item, rounds[0]), 0)]
    for position, current in enumerate(rounds):
        corners.append((current.stop_length, current.rows, current.kv_bytes))
        cut = rejected.get(position)
        live = current.rows if cut is None else len(current.scores.keys() - cut)
        rows = min(current.kept, live)
        share = rows / current.rows if current.rows else 0.0
        corners.append((current.stop_length, rows, current.kv_bytes * share))
    measured = len(corners)
    length, rows, used = corners[-1]
    last = longest_answer(item)
    if rows and last > length > 0:
        corners.append((last, rows, used * last / length))
    return Teeth(corners, measured)


def rejected_by_round(item: dict[str, Any]) -> dict[int, set[int]]:
    """Candidates cut in each round; empty where the file does not list them."""
    cut: dict[int, set[int]] = {}
    listed = item.get("rejected")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and all(
            type(entry.get(k)) is int for k in ("round", "candidate")
        ):
            cut.setdefault(entry["round"], set()).add(entry["candidate"])
    return cut


def rows_at_start(item: dict[str, Any], first: Round) -> int:
    """Every candidate ends as completed, rejected or failed."""
    ends = [item.get(key) for key in ("trajectories", "rejected", "failed_rows")]
    return max(first.rows, sum(len(end) for end in ends if isinstance(end, list)))


def longest_answer(item: dict[str, Any]) -> int:
    return max((count_of(row.get("num_tokens")) or 0 for row in item["trajectories"]), default=0)


def room_of(item: dict[str, Any], rounds: Sequence[Round]) -> float | None:
    """Bytes of the plan's pages, a page's bytes being what a row's pages held in the first round.

    The last sampled token of a row needs no place in the cache. None where the plan is silent.
    """
    plan = item.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    pages, page_size = count_of(plan.get("pages")), count_of(plan.get("page_size"))
    first = rounds[0]
    if not pages or not page_size or not first.rows or not first.kv_bytes:
        return None
    pages_a_row = max(1, -(-(first.stop_length - 1) // page_size))
    return pages * first.kv_bytes / (first.rows * pages_a_row)


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
            if rejections := [r for r in rounds if not r.final and r.rows]:
                return idx, item, rejections
    return None


def draw(
    run: Run, idx: int, item: dict[str, Any], rounds: list[Round], args: argparse.Namespace
) -> list[Path]:
    plt = pictures.start(args.show)
    from matplotlib.ticker import LogLocator, NullLocator

    found = teeth(item, rounds)
    corners, measured = found.corners, found.measured
    lengths, rows, used = (list(column) for column in zip(*corners, strict=True))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5.2), sharex=True)
    unit = next((name for name, size in UNITS.items() if max(used) >= size), "KiB")
    size = UNITS[unit]
    parts = [(slice(0, measured), "-"), (slice(measured - 1, None), "--")]
    for part, style in parts:
        top.plot(lengths[part], rows[part], style, color=pictures.CYCLE[0])
        bottom.plot(lengths[part], [b / size for b in used[part]], style, color=pictures.CYCLE[1])
    bottom.lines[0].set_label("generator's cache")
    if max(rows) > 8 * min(rows) > 0:
        top.set_yscale("log")
        top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        top.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        top.yaxis.set_minor_locator(NullLocator())
    else:
        top.set_ylim(0, 1.1 * max(rows))
    top.set_ylabel("rows")
    room = room_of(item, rounds)
    if room:
        bottom.axhline(
            room / size, color="black", linewidth=0.8, linestyle=":", label="the plan's room"
        )
    reward = [r.reward_kv_bytes for r in rounds]
    if any(reward):
        spots = [r.stop_length for r in rounds]
        label = "reward model's cache at the rejections"
        bottom.plot(
            spots,
            [b / size for b in reward],
            "^",
            color=pictures.CYCLE[2],
            label=label,
            clip_on=False,
        )
    if room or any(reward):
        bottom.legend(frameon=False, loc="best", fontsize=9)
    bottom.set_ylabel(f"KV cache, {unit}")
    bottom.set_xlabel("answer length, tokens")
    bottom.set_ylim(bottom=0)
    top.set_title(
        args.title or f"{run.method.name}, {run.llm} with {run.reward}, prompt {idx}", fontsize=10
    )
    figure.tight_layout()
    _label_rows(top, corners, measured)
    return pictures.save(figure, args.out, f"memory_{run.name}_prompt_{idx}", args.show)


def _label_rows(axes: Axes, corners: Sequence[tuple[float, float, float]], measured: int) -> None:
    """Rows at each rejection and at the end; a number that would touch another is left out."""
    axes.figure.canvas.draw()  # the limits are final: sizes can be measured
    renderer = axes.figure.canvas.get_renderer()
    taken: list[Bbox] = []
    for number, (length, rows, _) in enumerate([corners[-1], *corners[1:measured:2]]):
        where, level = ((3, 3), "baseline") if number else ((3, 0), "center")
        text = axes.annotate(
            f"{rows:.0f}", (length, rows), where, textcoords="offset points", fontsize=8, va=level
        )
        box = text.get_window_extent(renderer)
        if any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


def work(args: argparse.Namespace) -> int:
    paths: list[Path] = []
    code = EXIT_OK
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
        done.add((run.pair, run.method.name))
        paths += draw(run, *found, args)
    if not done:
        which = "" if args.prompt is None else f" for prompt {args.prompt}"
        raise Refused(
            f"no run has rounds with a rejection{which}: the paper's files record none, and ours "
            "have none where all rows fit (try a smaller --kv_cache_gb, or --schedule halving)"
        )
    print(*paths, sep="\n")  # last: a pipe that closes early costs no picture
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
