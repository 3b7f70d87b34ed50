"""`make demo`: both methods on a handful of prompts with the embedded models, and a table.

Runs `accelerate launch main.py` twice, as a user would, in the same memory for keys and values, and
reads the JSON files that come out. Run again, it resumes: what is done is only shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suite.progress import best_trajectory
from suite.settings import PROJECT

FOLDER = PROJECT / "archive" / "demo"
# Eight full-length answers fit in this memory, or sixteen of 64 tokens: Speculative Rejection
# starts with sixteen and drops the worse half at 32 and at 64 tokens. The reward model keeps no
# cache, so that all of the memory is the generator's in both runs.
SHARED = ("--num_prompts", "5", "--max_gen_tokens", "100", "--kv_cache_gb", "0.0475", "--seed", "0")
METHODS = {
    "Best-of-8": ("--batch_size", "8"),
    "Speculative Rejection": (
        *("--speculative_rejection", "--alpha", "0.5", "--init_batch_size", "16"),
        *("--reward_cache", "off", "--schedule", "halving", "--min_tokens", "32"),
    ),
}


READING = (
    "Both use the same memory. Best-of-8 runs eight answers to their end; Speculative Rejection\n"
    "starts sixteen and cuts the worse half twice, by the scores of the unfinished texts: twice\n"
    "as many answers are looked at for less than twice the cost. It is meant for longer answers\n"
    "and many more of them, where memory is what runs out."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, prints the table; further arguments go to both runs."""
    extra = list(sys.argv[1:] if argv is None else argv)
    start = time.monotonic()
    results = {}
    for name, flags in METHODS.items():
        folder = FOLDER / name.replace(" ", "_")
        print(f"\n== {name} ==", flush=True)
        line = [*launcher(), str(PROJECT / "main.py"), "--output_folder", str(folder)]
        code = subprocess.run([*line, *SHARED, *flags, *extra], check=False).returncode
        if code != 0:
            print(f"demo: {name} ended with exit code {code}; its messages are above")
            return 1
        results[name] = read_run(folder)
    print()
    print(table(results))
    print()
    for name, run in results.items():
        print(f"{name}: {counts(run)}")
    print(READING)
    where = os.path.relpath(FOLDER)
    print(f"\nThe answers are in {where}; {time.monotonic() - start:.0f} s in all.")
    return 0


def launcher() -> list[str]:
    """`accelerate launch` for one process on this machine, with the cores that are free."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(free_cores())
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    where = ["--num_processes", "1", "--num_machines", "1", "--machine_rank", "0"]
    plain = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    return [*launch, *where, *plain, "--num_cpu_threads_per_process", threads]


def free_cores() -> int:
    """NOTE: threads that wait for one that has no core make a busy machine ten times slower."""
    cores = os.cpu_count() or 1
    return max(1, cores - round(os.getloadavg()[0]))


def read_run(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The objects of each prompt of a folder, by JSON_idx."""
    records = (json.loads(path.read_text()) for path in folder.glob("*_prompt_*.json"))
    return {record[0]["prompt"]["JSON_idx"]: record for record in records}


def table(results: dict[str, dict[int, list[dict[str, Any]]]]) -> str:
    """One line a prompt, three columns a method, and the sums."""
    names = list(results)
    first = results[names[0]]
    head = f"{'':40}" + "".join(f" | {name:^43}" for name in names)
    columns = (
        f"{'prompt':40}"
        + f" | {'best':>8} {'generated':>10} {'scored':>10} {'seconds':>12}" * len(names)
    )
    lines = [head, columns, "-" * len(columns)]
    for json_idx in sorted(first):
        prompt = " ".join(first[json_idx][0]["prompt"]["prompt"].split())
        cells = [_cells(results[name].get(json_idx, [])) for name in names]
        lines.append(f"{prompt[:40]:40}" + "".join(_row(*cell) for cell in cells))
    lines.append("-" * len(columns))
    lines.append(f"{'mean score, sums':40}" + "".join(_row(*_sums(results[n])) for n in names))
    return "\n".join(lines)


def counts(run: dict[int, list[dict[str, Any]]]) -> str:
    """How many answers were started and what became of them."""
    objects = [o for each in run.values() for o in each]
    cut = sum(len(o.get("rejected") or ()) for o in objects)
    finished = sum(len(o["trajectories"]) for o in objects)
    return f"{finished + cut} answers started, {cut} cut early, {finished} finished"


Cells = tuple[float | None, int, int, float]


def _cells(objects: list[dict[str, Any]]) -> Cells:
    """Best score, tokens generated, tokens that the reward model read, seconds."""
    best = best_trajectory(objects)
    return (
        best["score"] if best else None,
        sum(o.get("tokens_generated", 0) for o in objects),
        sum(o.get("tokens_scored", 0) for o in objects),
        max((o["elapsed_sec"] for o in objects), default=0.0),
    )


def _sums(run: dict[int, list[dict[str, Any]]]) -> Cells:
    cells = [_cells(objects) for objects in run.values()]
    scores = [cell[0] for cell in cells if cell[0] is not None]
    mean = sum(scores) / len(scores) if scores else None
    return mean, *(sum(cell[i] for cell in cells) for i in (1, 2, 3))


def _row(score: float | None, generated: int, scored: int, seconds: float) -> str:
    shown = "-" if score is None else f"{score:.3f}"
    return f" | {shown:>8} {generated:>10,} {scored:>10,} {seconds:>12.1f}"


if __name__ == "__main__":
    sys.exit(main())
