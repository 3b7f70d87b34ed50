"""`make demo`: the real thing on one prompt, and its table worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suite import demo
from tests.launch import records


def made(json_idx: int, *scores: float, generated: int, scored: int, seconds: float) -> list[Any]:
    return [
        {
            "prompt": {"JSON_idx": json_idx, "prompt": f"prompt\n{json_idx}"},
            "trajectories": [{"score": score} for score in scores],
            "tokens_generated": generated,
            "tokens_scored": scored,
            "elapsed_sec": seconds,
        }
    ]


def test_the_table() -> None:
    """Means of the best: (2 + 4) / 2 = 3 and 5; tokens 1000 + 200, 900 + 100; seconds 1.5 + 2."""
    first = {
        0: made(0, 1.0, 2.0, generated=1000, scored=900, seconds=1.5),
        1: made(1, 4.0, generated=200, scored=100, seconds=2.0),
    }
    second = {0: made(0, 5.0, generated=7, scored=8, seconds=9.0)}
    lines = demo.table({"A": first, "B": second}).splitlines()
    assert lines[3].split("|")[0].strip() == "prompt 0"
    assert lines[3].split("|")[1].split() == ["2.000", "1,000", "900", "1.5"]
    assert lines[3].split("|")[2].split() == ["5.000", "7", "8", "9.0"]
    assert lines[4].split("|")[2].split() == ["-", "0", "0", "0.0"]
    assert lines[-1].split("|")[1].split() == ["3.000", "1,200", "1,000", "3.5"]
    assert lines[-1].split("|")[2].split() == ["5.000", "7", "8", "9.0"]


def test_answers_started_cut_and_finished_are_counted() -> None:
    run = {0: made(0, 1.0, 2.0, generated=1, scored=1, seconds=1.0)}
    run[0][0]["rejected"] = [{"candidate": 2}] * 3
    assert demo.counts(run) == "5 answers started, 3 cut early, 2 finished"


def test_the_demo_runs_both_methods_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    short = ["--num_prompts", "1", "--max_gen_tokens", "34"]
    assert demo.main(short) == 0
    shown = capfd.readouterr()
    assert "Best-of-8" in shown.out and "Speculative Rejection" in shown.out
    assert "Name three things to pack for a rainy da" in shown.out
    found = {name: records(tmp_path / name) for name in ("Best-of-8", "Speculative_Rejection")}
    for name, number in (("Best-of-8", 8), ("Speculative_Rejection", 16)):
        ((objects,),) = found[name].values()
        assert len(objects["trajectories"]) + len(objects["rejected"]) == number
        assert objects["reward_model_name"] == "SmolLM2-135M-Reward"
    assert demo.main(short) == 0  # resumes
    assert "1 done before" in capfd.readouterr().err
    assert {name: records(tmp_path / name) for name in found} == found


def test_a_run_that_fails_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--top_k", "-5"]) == 1
    shown = capfd.readouterr()
    assert "Best-of-8 ended with exit code" in shown.out and "--top_k must be" in shown.err
