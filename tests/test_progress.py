"""What a person sees: the bar on a terminal, silence elsewhere, one safe line a prompt."""

from __future__ import annotations

import io
from typing import Any

import pytest

from suite.progress import Progress, best_trajectory, summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def made(*scores: float | None, output: str = "text", **fields: Any) -> dict[str, Any]:
    return {
        "trajectories": [{"output": f"{output}{i}", "score": s} for i, s in enumerate(scores)],
        "tokens_generated": 1000,
        "elapsed_sec": 2.0,
        **fields,
    }


def test_a_terminal_shows_prompts_rows_length_and_round() -> None:
    stream = Terminal()
    with Progress(10, 4, stream=stream) as progress:
        progress.update(rows=64, length=128, round=2)
        progress._drawn_at = 0.0  # the next look is not too soon
        progress.update(rows=32, length=256, round=3)
        progress.finish(4, [made(0.5)])
    shown = stream.getvalue()
    assert "4/10 prompts" in shown and "5/10 prompts" in shown
    assert "rows 32, length 256, round 3" in shown
    assert 'prompt 4: best 0.5 of 1: "text0"; 1,000 tokens, 2.0 s' in shown
    assert shown.endswith("\r\x1b[K")  # nothing is left on the line


def test_no_bar_in_a_file_but_the_lines() -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.update(rows=1, length=2, round=3)
        progress.finish(0, [made(1.0)])
        progress.fail(1, "no candidate has a score")
    assert stream.getvalue().splitlines() == [
        'prompt 0: best 1 of 1: "text0"; 1,000 tokens, 2.0 s',
        "prompt 1: failed: no candidate has a score",
    ]


def test_other_processes_are_silent() -> None:
    stream = Terminal()
    with Progress(2, speaks=False, stream=stream) as progress:
        progress.update(rows=1)
        progress.finish(0, [made(1.0)])
    assert stream.getvalue() == ""


def test_updates_are_drawn_ten_times_a_second_at_most() -> None:
    stream = Terminal()
    with Progress(2, stream=stream) as progress:
        for length in range(10_000):
            progress.update(length=length)
    assert stream.getvalue().count("prompts") < 50


def test_the_best_is_the_first_of_the_highest_and_never_a_missing_score() -> None:
    objects = [made(None, 0.5), made(0.7, 0.7)]
    assert best_trajectory(objects) is objects[1]["trajectories"][0]
    assert best_trajectory([made(None)]) is None
    assert best_trajectory([]) is None


def test_sums_and_the_slowest_process() -> None:
    text = summary([made(0.5, elapsed_sec=3.0), made(0.25)])
    assert text == 'best 0.5 of 2: "text0"; 2,000 tokens, 3.0 s'
    assert summary([made()]) == "no scored answer; 1,000 tokens, 2.0 s"
    assert summary([{"skipped": "the prompt is empty", "trajectories": []}]) == (
        "skipped: the prompt is empty"
    )


def test_a_models_text_can_not_drive_the_terminal() -> None:
    text = summary([made(0.5, output="\x1b[2J\r\n\x07red " + "x" * 500)])
    assert "\x1b" not in text and "\n" not in text and "\x07" not in text
    assert "..." in text and len(text) < 140


def test_a_process_without_stderr_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with Progress(1) as progress:
        progress.update(rows=1)
        progress.finish(0, [{"trajectories": [], "elapsed_sec": 1.0, "tokens_generated": 1}])
