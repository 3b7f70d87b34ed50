"""Starts real runs for tests: `accelerate launch` lines, waiting, comparing folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from suite.settings import PROJECT

PLAIN = ["--mixed_precision", "no", "--dynamo_backend", "no"]
SCRIPTED = "tests/scripted.py"
TIMES = ("elapsed_sec", "clock", "capture_sec", "peak_memory_bytes", "output_folder", "device")


def launcher(num_processes: int, *more: str) -> list[str]:
    """The contract's line for one or several processes, with a free port."""
    line = [sys.executable, "-m", "accelerate.commands.launch"]
    if num_processes > 1:
        line += ["--multi_gpu", "--main_process_port", "0"]
    gpus = ",".join(map(str, range(num_processes)))
    line += ["--num_processes", str(num_processes), "--num_machines", "1", "--machine_rank", "0"]
    return [*line, "--gpu_ids", gpus, *PLAIN, *more]


def environment(script: dict[str, Any] | None = None) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**env, "SCRIPT": json.dumps(script or {})}


def run(line: list[str], script: dict[str, Any] | None = None, **options: Any) -> Any:
    """A finished run; `returncode`, `stdout` and `stderr` of the whole launcher."""
    return subprocess.run(
        line,
        cwd=PROJECT,
        env=environment(script),
        capture_output=True,
        text=True,
        timeout=180,
        **options,
    )


def begin(line: list[str], script: dict[str, Any] | None = None) -> subprocess.Popen[str]:
    """A run that goes on; its own session, so that a test can end all of it."""
    pipe = subprocess.PIPE
    env = environment(script)
    return subprocess.Popen(
        line, cwd=PROJECT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], Any], seconds: float = 60, what: str = "it") -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The record files of a folder by name, without what depends on the clock."""
    found = {}
    for path in sorted(folder.glob("*_prompt_*.json")):
        objects = json.loads(path.read_text())
        for one in objects:
            one.get("plan", {}).pop("recording_sec", None)
        found[path.name] = [{k: v for k, v in o.items() if k not in TIMES} for o in objects]
    return found


def workers(folder: Path) -> list[int]:
    """The processes that work on `folder`, without their launcher: by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if str(folder) in words and not any("accelerate" in word for word in words):
            found.append(int(entry.name))
    return sorted(found)


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def direct(*flags: str) -> list[str]:
    return [sys.executable, SCRIPTED, *flags]
