"""Runs of win_rate.py for the tests: pairs of files, a stand-in for df_gamed.csv."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import logging
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from postprocess import judging, win_rate
from postprocess.command import LOG, PROJECT
from tests.openai_server import JudgeServer

KEY = "sk-test-0123456789"


def rows(generator: str, outputs: list[str], score: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"instruction": f"Say {place}.", "output": text, "generator": generator, "score": score}
        for place, text in enumerate(outputs)
    ]


def write_pair(folder: Path, compare: list, reference: list, name: str = "X") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_compare.json").write_text(json.dumps(compare))
    (folder / f"{name}_ref.json").write_text(json.dumps(reference))
    return folder


def leaderboard(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {row["generator"]: row for row in csv.DictReader(file)}


def good_wins(instruction: str, m: str, big_m: str) -> dict[str, float]:
    """An answer with "good" in it wins with 90 %; two of a kind are even."""
    sides = ("good" in m, "good" in big_m)
    chance = {(True, False): 0.9, (False, True): 0.1}.get(sides, 0.5)
    return {"m": chance, "M": 1 - chance}


def write_gamed(path: Path) -> Path:
    """Two gamed models over 805 instructions, the columns of the real df_gamed.csv."""
    rng = random.Random(0)
    difficulty = [rng.gauss(0, 1) for _ in range(805)]
    with path.open("w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(judging.GAMED_COLUMNS)
        for model, side in (("concise", -1), ("verbose", 1)):
            for place, hard in enumerate(difficulty):
                gap = side + rng.gauss(0, 0.3)
                chance = 1 / (1 + math.exp(-gap + rng.gauss(0, 0.3)))
                writer.writerow([place, f"{chance:.4f}", f"{gap:.4f}", f"{hard:.4f}", False, model])
    return path


def env_of(**more: str) -> dict[str, str]:
    """A user's environment without any judge in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "HF_"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": "/nonexistent",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_win_rate(folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script in this process (alpaca_eval has its own), with a user's environment."""
    out, err = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(err)
    LOG.addHandler(handler)
    try:
        with (
            mock.patch.dict(os.environ, env_of(**env), clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = win_rate.main(["--out", str(folder), "--imgs", str(folder / "imgs"), *flags])
    finally:
        LOG.removeHandler(handler)
    return subprocess.CompletedProcess(flags, code, out.getvalue(), err.getvalue())


def type_win_rate(folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The same as the user types it."""
    command = [sys.executable, "postprocess/win_rate.py", "--out", str(folder)]
    command += ["--imgs", str(folder / "imgs"), *flags]
    return subprocess.run(
        command, cwd=PROJECT, env=env_of(**env), capture_output=True, text=True, timeout=300
    )


def judge_flags(judge: JudgeServer) -> list[str]:
    return ["--judge_url", judge.url, "--judge_model", "my-judge-instruct"]


def installed() -> Path:
    """The package's folder, found without importing it."""
    spec = importlib.util.find_spec("alpaca_eval")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def everything_in(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
