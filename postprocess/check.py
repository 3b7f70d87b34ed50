"""What archive/ holds: one line a run, then every fault by name.

Missing: prompts of the run's prompt file, where that file is there, else prompts that another run
of the same models has. Unreadable: files that are not valid. Mixed: settings, process counts or
prompt numbers that do not belong together.

Exit codes: 0 all complete; 1 something is missing or wrong; 2 no runs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import EXIT_OK, EXIT_WRONG, PROJECT, guarded, parser, table
from postprocess.reading import MAX_FILE_BYTES, shown
from postprocess.runs import Run, by_pair, find_folders, load_run
from postprocess.stats import brief
from suite.prompts import load_prompts

FAULTS = ("unreadable", "mixed", "failed", "unscored", "skipped")
# A prompt over the length bound is skipped rightly, and a NaN score is ignored: said, not wrong.
WRONG = ("unreadable", "mixed", "failed")


def prompts_wanted(run: Run, siblings: Iterable[Run]) -> tuple[set[int], str]:
    """JSON_idx that the run should have, and where that is known from."""
    for result in run.prompts.values():
        name = result.settings.get("data_filename")
        if isinstance(name, str) and (listed := _prompt_file(name)):
            limit = result.settings.get("num_prompts")
            return set(listed[:limit] if isinstance(limit, int) else listed), name
        break
    every = set().union(*(other.prompts.keys() for other in siblings))
    return every, "the other runs"


def _prompt_file(name: str) -> list[int] | None:
    """The JSON_idx of a prompt file that lies here; a data set's id asks no hub."""
    path = Path(name) if Path(name).is_absolute() else PROJECT / name
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
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
                text = f"missing: {brief(missing)} (of {shown(source)})"
                faults.append(f"{shown(run.folder.name)}: {text}")
            if not run.prompts:
                faults.append(f"{shown(run.folder.name)}: no usable prompt")
    print(table(["run", "method", "prompts", "GPUs", "missing", *FAULTS, ""], rows))
    if faults:
        print("\n" + "\n".join(faults))
    print(f"\n{len(runs)} runs, {wrong} of them wrong")
    return EXIT_WRONG if wrong else EXIT_OK


def _skipped(idx: int, names: set[str]) -> bool:
    return any(name.endswith(f"_prompt_{idx:04d}.json") for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(work, parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
