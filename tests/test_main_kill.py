"""Killed runs resume to the same folder; long runs stay flat in memory, time and handles."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.launch import begin, kill, records, run, wait_for, workers
from tests.tiny_runs import KILLED, MODELS, prompt_file, real

WAYS = ("one", "all", "term", "interrupt")


@pytest.fixture(scope="module")
def uninterrupted(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `bon` and `spr`, each of two processes and 8 prompts."""
    folder = tmp_path_factory.mktemp("two")
    for name, flags in KILLED.items():
        done = run(real(2, tiny_models, folder / name, *flags))
        assert done.returncode == 0, done.stderr
    return folder


def test_killed_runs_resume_to_the_same_folder(
    uninterrupted: Path, tiny_models: Path, tmp_path: Path
) -> None:
    _kill_and_resume(uninterrupted, tiny_models, tmp_path, 4, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_25_killed_runs_resume_to_the_same_folder(
    uninterrupted: Path, tiny_models: Path, tmp_path: Path
) -> None:
    _kill_and_resume(uninterrupted, tiny_models, tmp_path, 25, seed=1)


def _kill_and_resume(
    uninterrupted: Path, models: Path, tmp_path: Path, number: int, seed: int
) -> None:
    """Each kill hits a run somewhere between its start and its end; then a run goes to the end."""
    draw = random.Random(seed)
    for attempt in range(number):
        method = ("bon", "spr")[attempt // len(WAYS) % 2 if number > len(WAYS) else attempt % 2]
        out = tmp_path / f"{method}{attempt}"
        line = real(2, models, out, *KILLED[method])
        way = WAYS[attempt % len(WAYS)]
        _start_and_kill(line, out, way, draw)
        left = _check_whole(out)
        done = run(line)
        assert done.returncode == 0, (way, done.stderr)
        assert records(out) == records(uninterrupted / method), way
        for path, time_ns in left.items():
            assert path.stat().st_mtime_ns == time_ns, f"{path.name} was computed twice ({way})"
        assert not list(out.glob(".*.tmp")) and not (out / "failures.jsonl").exists()


def _start_and_kill(line: list[str], out: Path, way: str, draw: random.Random) -> None:
    with begin(line) as process:
        wait_for(lambda: len(workers(out)) == 2 or process.poll() is not None, what="two workers")
        files = draw.randrange(8)  # with 0: while starting; otherwise about when that one appears
        wait_for(partial(_has_files, process, out, files), what=f"{files} files")
        time.sleep(draw.uniform(0, 0.3 if files else 4))
        pids = workers(out)
        start = time.monotonic()
        if way == "one" and pids:
            kill([draw.choice(pids)])
        elif way == "all":
            os.killpg(process.pid, signal.SIGKILL)
            kill(pids)
        elif way == "term":
            process.terminate()
        elif way == "interrupt":
            process.send_signal(signal.SIGINT)
        limit = 60 if way == "one" else 10
        wait_for(lambda: not workers(out), limit, f"the end after {way}")
        process.communicate(timeout=60)
        assert time.monotonic() - start < 60


def _has_files(process: subprocess.Popen[str], out: Path, number: int) -> bool:
    return len(records(out)) >= number or process.poll() is not None


def _check_whole(out: Path) -> dict[Path, int]:
    """Every file that is there parses; gives their times."""
    found = {}
    for path in out.glob("*_prompt_*.json"):
        assert json.loads(path.read_text())
        found[path] = path.stat().st_mtime_ns
    return found


# ---- load --------------------------------------------------------------------------------------


def test_memory_time_and_handles_stay_flat(tiny_models: Path, tmp_path: Path) -> None:
    _run_many(tiny_models, tmp_path, 300)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_thousand_prompts_stay_flat(tiny_models: Path, tmp_path: Path) -> None:
    _run_many(tiny_models, tmp_path, 2000)


def _run_many(models: Path, tmp_path: Path, number: int) -> None:
    """8 candidates a prompt: memory within 5 % after a third, no handle more, no slower prompt."""
    flags = prompt_file(tmp_path, *(f"prompt number {i} of many" for i in range(number)))
    out = tmp_path / "out"
    where = ["--model_dir", str(models), "--output_folder", str(out)]
    size = ["--batch_size", "8", "--max_gen_tokens", "16"]
    line = [sys.executable, "main.py", *MODELS, *where, *flags, *size]
    samples = []
    with begin(line) as process:
        drain = threading.Thread(target=process.communicate, daemon=True)
        drain.start()
        while process.poll() is None:
            samples.append((len(list(out.glob("*.json"))), *_memory_and_handles(process.pid)))
            time.sleep(0.1)
        drain.join(30)
    assert process.returncode == 0
    later = [s for s in samples if number / 3 <= s[0] < number and s[1] and s[2]]
    assert len(later) >= 5, f"{len(samples)} samples are too few to see a leak"
    memory = [s[1] for s in later]
    assert max(memory) <= 1.05 * memory[0], f"memory grows: {memory[0]} to {max(memory)} kB"
    handles = [s[2] for s in later]
    assert max(handles) <= min(handles) + 3, f"handles grow: {handles}"
    seconds = [objects[0]["elapsed_sec"] for objects in _with_times(out)]
    early, late = sorted(seconds[number // 3 : 2 * number // 3]), sorted(seconds[-number // 3 :])
    assert late[len(late) // 2] < 1.5 * early[len(early) // 2]


def _memory_and_handles(pid: int) -> tuple[int, int]:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+([0-9]+) kB", status)
        return (int(resident[1]) if resident else 0), len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0, 0


def _with_times(out: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("*_prompt_*.json"))]
