"""A reward function that leaves, hangs or changes the working folder ends no run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewards.function_reward import FunctionReward
from suite.settings import PROJECT
from tests.launch import environment, records


def leaves(prompt: str, answers: list[str]) -> list[float]:
    raise SystemExit(0)


class Unnumbered:
    def __float__(self) -> float:
        raise SystemExit(3)


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (leaves, "raised SystemExit: 0"),
        (lambda p, a: [Unnumbered()] * len(a), "raised SystemExit: 3"),
        (lambda p, a: None, "NoneType"),
        (lambda p, a: [1j] * len(a), "complex"),
        (lambda p, a: [10**400] * len(a), "too large"),
        (lambda p, a: np.ones((len(a), 2)), "must return a list of numbers"),
    ],
)
def test_a_function_ends_no_run(function: Any, reason: str, timeout: float | None) -> None:
    """sys.exit(0) in a reward function would end a run as if all were done."""
    from engine.candidates import Candidate
    from rewards.base import RewardFailed

    reward = FunctionReward("m:f", function, lambda ids: ["a"] * len(ids), timeout)
    reward.begin("p")
    with pytest.raises(RewardFailed, match=reason):
        reward.score([Candidate(0, np.zeros(1, np.int64)), Candidate(1, np.zeros(1, np.int64))])


WANDERS = """
import os, pathlib, time

home = pathlib.Path(__file__).parent
(home / "far" / "off").mkdir(parents=True, exist_ok=True)
if WHEN == "import":
    os.chdir(home / "far")

def score(prompt, answers):
    if WHEN == "import":
        assert os.getcwd() == str(home / "far")  # its own folder stays as it was left
    if WHEN == "late":
        time.sleep(0.3)  # three prompts later
    os.chdir(home / "far" / "off")
    if WHEN == "late":
        os.chdir(home)
    if WHEN == "import":
        os.chdir(home / "far")
    return [float(len(answer)) for answer in answers]
"""


@pytest.mark.parametrize("when", ["import", "call", "call in time", "late"])
def test_a_function_that_changes_the_working_folder(
    tiny_models: Path, tmp_path: Path, when: str
) -> None:
    """Every path of the command is relative to where it was typed; so are the files it makes."""
    typed, home = tmp_path / "typed", tmp_path / "home"
    for folder in (typed, home):
        folder.mkdir()
    (home / "wanders.py").write_text(WANDERS.replace("WHEN", repr(when)))
    (typed / "p.json").write_text(json.dumps([{"prompt": f"prompt {i}"} for i in range(8)]))
    (typed / "models").symlink_to(tiny_models)
    line = [sys.executable, str(PROJECT / "main.py"), "--reward_model_name", "wanders:score"]
    line += ["--model_dir", "models", "--llm_name", "tiny-llama", "--data_filename", "p.json"]
    line += ["--output_folder", "out", "--max_gen_tokens", "4", "--batch_size", "2"]
    if when in ("call in time", "late"):
        line += ["--reward_timeout", "0.1" if when == "late" else "60"]
    done = subprocess.run(
        line,
        cwd=typed,
        env=environment() | {"PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == (1 if when == "late" else 0), done.stderr
    if when == "late":
        assert len((typed / "out" / "failures.jsonl").read_text().splitlines()) == 8
    else:
        assert len(records(typed / "out")) == 8
    made = {path.name for path in home.rglob("*") if path.suffix != ".pyc"}
    assert made <= {"wanders.py", "far", "off", "__pycache__"}
