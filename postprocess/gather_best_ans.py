"""The best answer of each prompt, one file a run: archive/ -> results/<run>.json.

The highest finite score wins, ties go to the lower rank, then the lower candidate index. Each row
has what alpaca_eval reads (`instruction`: the raw prompt text, `output`, `generator`: the method)
and `JSON_idx`, `score`, `llm`, `reward`, `seed`. Exit codes: 0 done; 1 a run was left out; 2 no
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import EXIT_OK, EXIT_WRONG, LOG, add_out, dump, guarded, parser, write_text
from postprocess.runs import Run, load_runs, one_of_each
from postprocess.stats import brief


def best_answers(run: Run) -> list[dict[str, Any]]:
    """One row a prompt, by JSON_idx; a prompt whose text its file does not hold is left out."""
    rows, nameless = [], []
    for idx, result in run.prompts.items():
        assert result.best is not None, "a loaded run has a winner for every prompt"
        if result.prompt is None:
            nameless.append(idx)
            continue
        rows.append(
            {
                "JSON_idx": idx,
                "instruction": result.prompt,
                "output": result.best.output,
                "score": result.best.score,
                "generator": run.method.name,
                "llm": run.llm,
                "reward": run.reward,
                "seed": run.seed,
            }
        )
    if nameless:
        LOG.warning(
            "%s: prompts with JSON_idx %s left out, their files hold no prompt text",
            *(run.name, brief(nameless)),
        )
    return rows


def work(args: argparse.Namespace) -> int:
    """All files are written before anything is printed: a pipe that closes early costs none."""
    said: list[str] = []
    found = load_runs(args.places)
    runs = one_of_each(found)
    code = EXIT_OK if len(runs) == len(found) else EXIT_WRONG
    for run in runs:
        rows = best_answers(run)
        if not rows:
            code = EXIT_WRONG
            continue
        path = args.out / f"{run.name}.json"
        write_text(path, dump(rows))
        said.append(f"{path}: {len(rows)} answers\n")
    print("".join(said), end="")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    add_out(made, "results")
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
