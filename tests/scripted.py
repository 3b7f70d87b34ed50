"""`main.py` with a scripted generator in place of the real one: files, processes, signals only.

Used as `accelerate launch tests/scripted.py FLAGS`. `SCRIPT` in the environment holds JSON: the
seconds of a prompt, and what goes wrong at which prompt and process. Answers depend on seed and
prompt alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SCRIPT: dict[str, Any] = json.loads(os.environ.get("SCRIPT", "{}"))


class PromptFailed(RuntimeError):
    pass


class Generator:
    def __init__(self, settings: Any, processes: Any) -> None:
        self._settings, self._processes = settings, processes
        self._shared = settings.parallel == "candidates"

    def run(self, prompt: Any, progress: Any) -> dict[str, Any]:
        from suite.settings import settings_for_record

        _log(f"run {prompt.json_idx} rank {self._processes.rank}")
        progress.update(rows=self._settings.batch_size, length=1, round=0)
        self._misbehave(prompt.json_idx)
        seed = self._settings.seed + (self._processes.rank if self._shared else 0)
        return {
            **settings_for_record(self._settings),
            "process_seed": seed,
            "process_rank": self._processes.rank,
            "num_processes": self._processes.world_size,
            "prompt": prompt.record,
            "elapsed_sec": SCRIPT.get("seconds", 0.0),
            "clock": [["generation: decode", SCRIPT.get("seconds", 0.0)]],
            "trajectories": [
                self._trajectory(prompt, seed, c) for c in range(self._settings.batch_size)
            ],
            "tokens_generated": 7,
        }

    def _trajectory(self, prompt: Any, seed: int, candidate: int) -> dict[str, Any]:
        text = hashlib.sha256(f"{seed}|{prompt.prompt}|{candidate}".encode()).hexdigest()
        score = int(text[:8], 16) / 2**32
        output = text * SCRIPT.get("copies", 1)
        if prompt.json_idx == SCRIPT.get("nan_at"):
            score = float("nan")
        return {"prompt": prompt.prompt, "output": output, "score": score, "candidate": candidate}

    def _misbehave(self, json_idx: int) -> None:
        here = [json_idx, self._processes.rank]
        seconds = SCRIPT.get("seconds_of", {}).get(str(self._processes.rank))
        time.sleep(SCRIPT.get("seconds", 0.0) if seconds is None else seconds)
        if here in SCRIPT.get("fail", []):
            raise PromptFailed("scripted failure")
        if here in SCRIPT.get("raise", []):
            raise KeyError("scripted exception")
        if here in SCRIPT.get("kill", []):
            os.kill(os.getpid(), signal.SIGKILL)
        if here in SCRIPT.get("freeze", []):
            os.kill(os.getpid(), signal.SIGSTOP)
        if here in SCRIPT.get("block", []):
            _block_in_one_call()


def _block_in_one_call() -> None:
    """Thirty seconds inside C with the GIL released: Python's signal handlers don't run."""
    import ctypes

    libc = ctypes.CDLL(None)
    signals = ctypes.create_string_buffer(128)
    libc.sigfillset(signals)
    libc.pthread_sigmask(signal.SIG_BLOCK, signals, None)  # another thread takes the signal
    libc.sleep(30)


def _log(line: str) -> None:
    if "log" in SCRIPT:
        with open(SCRIPT["log"], "a", encoding="utf-8") as file:
            file.write(line + "\n")


def build(settings: Any, processes: Any) -> Generator:
    _log(f"build rank {processes.rank}")
    if processes.rank == SCRIPT.get("build_fails_on"):
        raise ValueError("--kv_cache_gb 0.001 is too small for one row; scripted")
    return Generator(settings, processes)


fake = types.ModuleType("generator")
fake.build, fake.Generator, fake.PromptFailed = build, Generator, PromptFailed
sys.modules["generator"] = fake

if __name__ == "__main__":
    import main

    code = main.main()
    if code > 128:
        os._exit(code)
    sys.exit(code)
