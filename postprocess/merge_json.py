"""Best answers for alpaca_eval: results/ -> win_rate/<models>_compare.json and _ref.json.

The reference is the base run alone (the largest Best-of-N, or --base); compare holds every other
method, told apart by `generator`. Both hold the same instructions, each once: alpaca_eval joins
on the exact text, so a second copy would multiply rows. Whatever is left out is named. Of several
seeds of a method the lowest is taken (a judge costs money); --all_seeds takes all, as
`<method>_seed_<seed>`. Exit codes: 0 done; 1 a pair could not be merged; 2 no results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import (
    EXIT_OK,
    EXIT_WRONG,
    LOG,
    PROJECT,
    Nothing,
    Refused,
    add_out,
    bare_parser,
    dump,
    guarded,
    write_text,
)
from postprocess.reading import BadFile, finite, load_json, shown
from postprocess.stats import brief
from suite.settings import base_name

Rows = list[dict[str, Any]]


def load_results(folder: Path) -> dict[str, list[Rows]]:
    """The files of gather_best_ans.py by pair; a file that is none is named and ignored."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    pairs: dict[str, list[Rows]] = {}
    for path in paths:
        try:
            rows = check_rows(load_json(path))
        except ValueError as error:
            text = str(error) if isinstance(error, BadFile) else f"{shown(path.name)}: {error}"
            LOG.warning("left out: %s", text)
            continue
        pairs.setdefault(f"{rows[0]['llm']}_{rows[0]['reward']}", []).append(rows)
    if not pairs:
        raise Nothing(
            f"no results in {shown(folder)}: python postprocess/gather_best_ans.py writes them"
        )
    return pairs


def check_rows(rows: Any) -> Rows:
    """Rows of one run, as gather_best_ans.py writes them."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError("want a list of answers")
    for position, row in enumerate(rows):
        for key in ("instruction", "output", "generator", "llm", "reward"):
            if not isinstance(row.get(key), str):
                raise ValueError(f"row {position}: {key} is missing or no string")
        for key in ("JSON_idx", "seed"):
            if not isinstance(row.get(key), int) or isinstance(row[key], bool):
                raise ValueError(f"row {position}: {key} is missing or no whole number")
        if finite(row.get("score")) is None:
            raise ValueError(f"row {position}: score is missing or no number")
    for key in ("llm", "reward", "generator", "seed"):
        if len({row[key] for row in rows}) > 1:
            raise ValueError(f"several values of {key} in one file")
    for key in ("llm", "reward", "generator"):
        if base_name(rows[0][key]) != rows[0][key]:
            raise ValueError(f"{key}: {shown(rows[0][key])} is no name")
    return rows


def choose_base(files: Sequence[Rows], wanted: str | None) -> Rows:
    """The run named with --base, or the largest Best-of-N with the lowest seed."""
    if wanted is not None:
        matches = [rows for rows in files if wanted in (generator_of(rows), full_name(rows))]
    else:
        best_of_n = [rows for rows in files if _candidates(rows)]
        largest = max((_candidates(rows) for rows in best_of_n), default=0)
        matches = [rows for rows in best_of_n if _candidates(rows) == largest]
    if not matches:
        there = ", ".join(sorted(full_name(rows) for rows in files))
        what = "no Best-of-N run" if wanted is None else f"no run {shown(wanted)}"
        raise Refused(f"{what} to be the reference (--base NAME); there is {there}")
    return min(matches, key=lambda rows: rows[0]["seed"])


def generator_of(rows: Rows) -> str:
    return rows[0]["generator"]


def full_name(rows: Rows) -> str:
    return f"{generator_of(rows)}_{rows[0]['llm']}_{rows[0]['reward']}_{rows[0]['seed']}"


def _candidates(rows: Rows) -> int:
    match = re.fullmatch(r"Bo(\d{1,9})", generator_of(rows))
    return int(match[1]) if match else 0


def unique(rows: Rows) -> Rows:
    """Each instruction once, the lowest JSON_idx first."""
    seen: dict[str, dict[str, Any]] = {}
    twice = []
    for row in sorted(rows, key=lambda row: row["JSON_idx"]):
        if row["instruction"] in seen:
            twice.append(row["JSON_idx"])
        else:
            seen[row["instruction"]] = row
    if twice:
        text = "%s: prompts with JSON_idx %s repeat an instruction, left out"
        LOG.warning(text, full_name(rows), brief(twice))
    return list(seen.values())


def choose_seeds(files: Sequence[Rows], base: Rows, all_seeds: bool) -> list[Rows]:
    """The runs to compare: not the base, one seed a method unless all are wanted."""
    methods: dict[str, list[Rows]] = {}
    for rows in files:
        if rows is not base:
            methods.setdefault(generator_of(rows), []).append(rows)
    chosen = []
    for name, found in methods.items():
        found.sort(key=lambda rows: rows[0]["seed"])
        if all_seeds and (len(found) > 1 or name == generator_of(base)):
            chosen += [
                [{**row, "generator": f"{name}_seed_{row['seed']}"} for row in rows]
                for rows in found
            ]
            continue
        others = found if name == generator_of(base) else found[1:]
        if others:
            seeds = ", ".join(str(rows[0]["seed"]) for rows in others)
            LOG.info("%s: seeds %s left out (--all_seeds takes them)", name, seeds)
        chosen += [rows for rows in found if rows not in others]
    return chosen


def merge(files: Sequence[Rows], base: Rows, all_seeds: bool) -> tuple[Rows, Rows]:
    """Compare and reference rows over the instructions that all have."""
    compared = [unique(rows) for rows in choose_seeds(files, base, all_seeds)]
    reference = unique(base)
    if not compared:
        raise Refused(f"{full_name(base)}: the only run of its pair, nothing to compare with it")
    common = set.intersection(
        *({row["instruction"] for row in rows} for rows in [reference, *compared])
    )
    for rows in [reference, *compared]:
        gone = [row["JSON_idx"] for row in rows if row["instruction"] not in common]
        if gone:
            text = "%s: prompts with JSON_idx %s left out, another run lacks them"
            LOG.warning(text, full_name(rows), brief(gone))
    if not common:
        raise Refused(
            f"{full_name(base)}: no instruction is in all runs; compare runs on the same prompts: "
            "empty results/, and name the runs to gather_best_ans.py"
        )
    compare = [row for rows in compared for row in rows if row["instruction"] in common]
    return compare, [row for row in reference if row["instruction"] in common]


def work(args: argparse.Namespace) -> int:
    code = EXIT_OK
    for pair, files in load_results(args.results).items():
        try:
            compare, reference = merge(files, choose_base(files, args.base), args.all_seeds)
        except Refused as error:
            LOG.error("%s: %s", pair, error)
            code = EXIT_WRONG
            continue
        for kind, rows in (("compare", compare), ("ref", reference)):
            path = args.out / f"{pair}_{kind}.json"
            write_text(path, dump(rows))
            names = ", ".join(dict.fromkeys(row["generator"] for row in rows))
            print(f"{path}: {len(reference)} instructions; {names}")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    made = bare_parser(__doc__)
    made.add_argument(
        "results", nargs="?", type=Path, default=PROJECT / "results", help="default: results/"
    )
    made.add_argument("--base", help="the reference (default: the largest Best-of-N)")
    made.add_argument("--all_seeds", action="store_true", help="compare every seed of a method")
    add_out(made, "win_rate")
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
