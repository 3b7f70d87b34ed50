"""Merges Best-of-N runs of one setting with different seeds: Bo960 x 2 and x 4 give Bo1920, Bo3840.

Without arguments it does so for all that archive/ holds, the lowest seeds first; folders to merge
can be named. Prompts are paired by JSON_idx; a merged file is the list of all objects, unchanged
but for `merged_from`. So the rule of time holds as it does for the processes of one run: the runs
are taken to run side by side, a prompt's seconds are those of its slowest object, and GPUs add
up. Refused by name: process seeds that overlap (candidates would count twice) and settings that
differ. Running it again changes nothing.

Exit codes: 0 done, or nothing to merge; 1 something was refused or a prompt could not be merged;
2 no runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import EXIT_OK, EXIT_WRONG, LOG, Refused, dump, guarded, parser, write_text
from postprocess.reading import differences, finite, load_objects, shown
from postprocess.runs import Method, Run, load_runs
from postprocess.stats import brief

DEFAULT_TIMES = (2, 4)


def check_mergeable(runs: Sequence[Run]) -> None:
    """Raises Refused, with names, unless the runs are one setting under disjoint process seeds."""
    first = runs[0]
    for run in runs:
        if run.method.kind != "Bo":
            raise Refused(f"{run.name}: only Best-of-N runs are merged; rejection is one run's own")
        if run.pair != first.pair:
            raise Refused(f"{first.name} and {run.name}: other models")
        if differing := differences(_settings(first), _settings(run)):
            raise Refused(f"{first.name} and {run.name} differ in {', '.join(differing)}")
    owner: dict[int, Run] = {}
    for run in runs:
        seeds = _process_seeds(run)
        if not seeds:
            raise Refused(f"{run.name}: its files tell no seed, so candidates might count twice")
        if shared := sorted(seeds & owner.keys()):
            other = owner[shared[0]].name
            text = f"share process seeds {brief(shared)}: candidates would count twice"
            raise Refused(f"{other} and {run.name} {text}")
        owner.update(dict.fromkeys(seeds, run))


def _settings(run: Run) -> dict[str, Any]:
    return next(iter(run.prompts.values())).settings


def _process_seeds(run: Run) -> set[int]:
    seeds = {seed for result in run.prompts.values() for seed in result.process_seeds}
    return set() if None in seeds else {seed for seed in seeds if seed is not None}


def merge(runs: Sequence[Run], target: Path) -> bool:
    """Writes the merged prompts; False when one was left out because a run lacks it."""
    check_mergeable(runs)
    every = set().union(*(run.prompts.keys() for run in runs))
    complete = set(every)
    for run in runs:
        complete &= run.prompts.keys()
        if missing := sorted(every - run.prompts.keys()):
            text = "%s: prompts with JSON_idx %s are missing in %s, not merged"
            LOG.warning(text, target.name, brief(missing), run.name)
    written = 0
    for idx in sorted(complete):
        written += _merge_prompt(runs, idx, target)
    LOG.info(
        "%s: %d prompts of %d runs, %d written", target.name, len(complete), len(runs), written
    )
    return complete == every


def _merge_prompt(runs: Sequence[Run], idx: int, target: Path) -> int:
    """1 when the file was written, 0 when it was there already as it should be."""
    texts = {result.prompt for run in runs if (result := run.prompts[idx]).prompt is not None}
    if len(texts) > 1:
        raise Refused(f"prompt {idx} is another text in {runs[0].name} than in the others")
    objects = [
        {**item, "merged_from": run.name}
        for run in runs
        for item in load_objects(run.prompts[idx].path)
    ]
    for item in objects:
        for row in item["trajectories"]:
            if row["score"] is not None and finite(row["score"]) is None:
                row["score"] = None  # a NaN of the paper's files; ours are strict JSON
    text = dump(objects, indent=None)
    path = target / f"{runs[0].pair}_prompt_{idx:04d}.json"
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
        return 0
    write_text(path, text)
    return 1


def merged_name(runs: Sequence[Run]) -> str:
    total = Method("Bo", n=sum(run.method.n or 0 for run in runs))
    return f"{total.name}_{runs[0].pair}_{runs[0].seed}"


def merge_all(runs: Sequence[Run], times: Sequence[int]) -> int:
    """Every setting that has enough seeds, `times` of them each, lowest seeds first."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.method.kind == "Bo" and not run.merged:
            groups.setdefault((run.pair, run.method.name), []).append(run)
    code, found = EXIT_OK, False
    own = {run.folder.resolve() for run in runs if not run.merged}
    for group in groups.values():
        group.sort(key=lambda run: run.seed)
        for count in times:
            if len(group) < count:
                continue
            found = True
            chosen = group[:count]
            target = chosen[0].folder.parent / merged_name(chosen)
            if target.resolve() in own:
                LOG.info("%s: is a run of its own, left as it is", target.name)
                continue
            try:
                complete = merge(chosen, target)
            except Refused as error:
                LOG.error("%s not made: %s", target.name, error)
                complete = False
            code = code if complete else EXIT_WRONG
    if not found:
        LOG.info("nothing to merge: no Best-of-N setting has %d or more seeds", min(times))
    return code


def work(args: argparse.Namespace) -> int:
    runs = load_runs(args.places)
    if args.target is None and _is_archive(args.places):
        return merge_all(runs, args.times)
    if args.target is None and len({run.folder.parent.resolve() for run in runs}) > 1:
        raise Refused(
            "the runs lie in several folders: say with --target where the merged run goes"
        )
    if len(runs) < 2:
        raise Refused(f"{runs[0].name}: one run, nothing to merge it with")
    runs.sort(key=lambda run: run.seed)
    check_mergeable(runs)
    target = args.target or runs[0].folder.parent / merged_name(runs)
    if target.resolve() in {run.folder.resolve() for run in runs}:
        raise Refused(f"{shown(target)}: is one of the runs to merge")
    return EXIT_OK if merge(runs, target) else EXIT_WRONG


def _is_archive(places: Sequence[Path]) -> bool:
    """One folder that holds runs, rather than being one."""
    return len(places) == 1 and not any(places[0].glob("*_prompt_*.json"))


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument(
        "--target", type=Path, help="folder of the merged run (default: beside the runs, by name)"
    )
    made.add_argument(
        "--times",
        type=_times,
        nargs="+",
        default=DEFAULT_TIMES,
        help="runs to merge (default: 2 4)",
    )
    return guarded(work, made.parse_args(argv))


def _times(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"want 2 or more, got {shown(text)}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
