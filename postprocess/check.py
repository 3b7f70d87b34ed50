"""What archive/ holds: one line a run, then every fault by name.

Missing, by one rule for every method: prompts that the run's own files ask for, which name the
prompt file and how many of it (`num_prompts`; where a resume asked for more, the most). Where that
file is not here: prompts that another run of the same models has, unless the run has as many as it
asked for. Unreadable: files that are not valid. Mixed: settings, process counts or prompt numbers
that do not belong together.

Exit codes: 0 all complete; 1 something is missing or wrong; 2 no runs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import EXIT_OK, EXIT_WRONG, PROJECT, guarded, parser, table
from postprocess.reading import MAX_FILE_BYTES, shown
from postprocess.runs import Run, by_pair, find_folders, load_run, passed_over
from postprocess.stats import brief
from suite.prompts import load_prompts

FAULTS = ("unreadable", "mixed", "failed", "unscored", "skipped")
# A prompt over the length bound is skipped rightly, and a NaN score is ignored: said, not wrong.
WRONG = ("unreadable", "mixed", "failed")


def prompts_wanted(run: Run, siblings: Iterable[Run]) -> tuple[set[int], str]:
    """JSON_idx that the run should have, and where that is known from."""
    asked = _asked(run)
    listed = {key: found for key, file in asked.items() if (found := file.indices())}
    said = " and ".join(map(str, asked.values()))
    if asked and len(listed) == len(asked):
        return {i for key, found in listed.items() for i in found[: asked[key].limit]}, said
    limits = [file.limit for file in asked.values()]
    skipped = sum(problem.kind == "skipped" for problem in run.problems)
    if asked and None not in limits and len(run.prompts) + skipped >= sum(limits):
        return set(run.prompts), said
    every = set().union(*(other.prompts.keys() for other in siblings))
    absent = ", ".join(shown(file.names[0]) for key, file in asked.items() if key not in listed)
    return every, "the other runs" + (f", as {absent} is not here" if absent else "")


@dataclass(slots=True)
class Asked:
    """A prompt file as a run's files name it (more than one way, where it was resumed from another
    folder), and how many prompts of it they ask for (None: all)."""

    names: list[str]
    limit: int | None

    def indices(self) -> list[int] | None:
        return next((found for name in self.names if (found := _prompt_file(name))), None)

    def __str__(self) -> str:
        name = shown(self.names[0])
        return name if self.limit is None else f"the first {self.limit} of {name}"


def _asked(run: Run) -> dict[str, Asked]:
    """By the file's own name."""
    asked: dict[str, Asked] = {}
    for result in run.prompts.values():
        name, limit = (result.settings.get(key) for key in ("data_filename", "num_prompts"))
        if isinstance(name, str):
            limit = limit if isinstance(limit, int) and limit > 0 else None
            file = asked.setdefault(Path(name).name, Asked([name], limit))
            file.limit = None if None in (file.limit, limit) else max(file.limit, limit)
            file.names = list(dict.fromkeys([*file.names, name]))
    return asked


def _prompt_file(name: str) -> list[int] | None:
    """The JSON_idx of a prompt file, found as main.py finds it; a data set's id asks no hub."""
    path = next((path for path in (Path(name), PROJECT / name) if path.is_file()), None)
    try:
        if path is None or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return [prompt.json_idx for prompt in load_prompts(str(path), local_files_only=True)]
    except (OSError, ValueError):
        return None


def work(args: argparse.Namespace) -> int:
    runs = [load_run(folder) for folder in find_folders(args.places)]
    rows, faults, wrong = [], [], 0
    for siblings in by_pair(runs).values():
        for run in siblings:
            wanted, source = prompts_wanted(run, siblings)
            skipped = {p.text.split(":")[0] for p in run.problems if p.kind == "skipped"}
            missing = [
                idx for idx in sorted(wanted - run.prompts.keys()) if not _skipped(idx, skipped)
            ]
            counts = Counter(problem.kind for problem in run.problems)
            bad = bool(missing or not run.prompts or any(counts[kind] for kind in WRONG))
            wrong += bad
            rows.append(
                [
                    *(shown(run.folder.name), run.method.name if run.method.kind != "?" else "?"),
                    *(len(run.prompts), run.num_gpus, len(missing)),
                    *(counts[kind] for kind in FAULTS),
                    "wrong" if bad else "complete",
                ]
            )
            faults += [f"{shown(run.folder.name)}: {p.kind}: {p.text}" for p in run.problems]
            if missing:
                text = f"missing: JSON_idx {brief(missing)} (of {source})"
                faults.append(f"{shown(run.folder.name)}: {text}")
            if not run.prompts:
                faults.append(f"{shown(run.folder.name)}: no usable prompt")
    print(table(["run", "method", "prompts", "GPUs", "missing", *FAULTS, ""], rows))
    if faults:
        print("\n" + "\n".join(faults))
    print(f"\n{len(runs)} runs, {wrong} of them wrong")
    _say_passed_over(args.places, runs)
    return EXIT_WRONG if wrong else EXIT_OK


def _say_passed_over(places: Sequence[Path], runs: Sequence[Run]) -> None:
    """Such as archive/demo/, once the archive holds other runs."""
    if left := passed_over(places, [run.folder for run in runs]):
        names = brief([shown(folder, 300) for folder in left])
        print(
            f"not checked, since other runs lie nearer: {names}; name these folders to check them"
        )


def _skipped(idx: int, names: set[str]) -> bool:
    return any(name.endswith(f"_prompt_{idx:04d}.json") for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(work, parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
