"""The pictures' numbers: the memory saw-tooth, partial against final scores, a prompt's scores."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import early_plot
from postprocess import pictures, plot_compare, plot_memory, plot_partial, plot_scores
from postprocess.plot_memory import teeth
from postprocess.rounds import rounds_of
from postprocess.runs import load_runs
from tests.postprocess_archive import PAIR, make_archive, make_object, speculative, write_run
from tests.test_early_rejection import made_up
from tests.test_postprocess_reading import paper_object


def a_round(
    number: int, length: int, scores: dict[int, float | None], kept: int, **fields: Any
) -> dict:
    made = {
        "round": number,
        "rows": len(scores),
        "stop_length": length,
        "candidates": list(scores),
        "scores": list(scores.values()),
        "cutoff": 0.5,
        "kept": kept,
        "kv_bytes": 100 * len(scores) * length,
        "reward_kv_bytes": 7,
    }
    return {**made, **fields}


def spr_object(idx: int, **fields: Any) -> dict[str, Any]:
    """Ten candidates. Two finish before the first stop at 8 tokens; eight are scored, four of
    them cut (and none of the finished). At 16 tokens four are scored, one cut. The last round
    scores the rest at 40.
    """
    first = {i: float(i) for i in range(8)}
    second = {4: 1.0, 5: 3.0, 6: 2.0, 7: 4.0}
    final = {5: 10.0, 6: 20.0, 7: 30.0}
    rounds = [
        a_round(0, 8, first, 6),
        a_round(1, 16, second, 5),
        a_round(2, 40, final, 5, cutoff=None, kv_bytes=0),
    ]
    item = make_object(idx, [1.0], 3, rounds=rounds, **speculative(0.5))
    item["trajectories"] = [
        {"prompt": "x", "output": f"a{c}", "score": score, "candidate": c, "num_tokens": tokens}
        for c, score, tokens in [
            (5, 10.0, 20),
            (6, 20.0, 40),
            (7, 30.0, 30),
            (8, 1.0, 3),
            (9, 2.0, 4),
        ]
    ]
    cut = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)]
    item["rejected"] = [{"candidate": c, "round": r, "length": 8, "score": 0.0} for c, r in cut]
    return {**item, **fields}


def test_saw_tooth_by_hand() -> None:
    """Rows: 10 at the start, 8 alive at 8 tokens, 4 after the cut; 4 at 16, 3 after; 3 to the
    end at 40. Bytes: 100 a row and token: 6400, half of it 3200; 6400, three quarters 4800; 4800
    x 40/16 = 12000.
    """
    item = spr_object(1)
    found = teeth(item, [r for r in rounds_of(item) if not r.final])
    assert found.corners == [
        (0, 10, 0),
        (8, 8, 6400),
        (8, 4, 3200),
        (16, 4, 6400),
        (16, 3, 4800),
        (40, 3, 12000),
    ]
    assert found.measured == 5


def test_saw_tooth_without_the_list_of_rejected() -> None:
    """The kept of the pool then stand for the rows: 6 of 8, and 4 of 4."""
    item = spr_object(1)
    del item["rejected"]
    found = teeth(item, [r for r in rounds_of(item) if not r.final])
    assert [rows for _, rows, _ in found.corners] == [8, 8, 6, 4, 4, 4]


def test_room_of_the_plan() -> None:
    """Eight rows at 8 tokens, pages of 4: (8 - 1)/4 is two pages a row, sixteen hold 6400 bytes,
    400 each; the plan has 20 of them.
    """
    item = spr_object(1, plan={"pages": 20, "page_size": 4})
    rounds = rounds_of(item)
    assert plot_memory.room_of(item, rounds) == 8000
    assert plot_memory.room_of({**item, "plan": None}, rounds) is None
    assert plot_memory.room_of({**item, "plan": {"pages": "x"}}, rounds) is None


def test_memory_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        write_run(
            tmp_path / "a",
            f"s{seed}",
            {1: [spr_object(1, seed=seed)], 2: [spr_object(2, seed=seed)]},
        )
    write_run(tmp_path / "a", "b", {1: [make_object(1, [1, 2], 3)]})
    assert plot_memory.main([str(tmp_path / "a"), "--out", str(tmp_path / "o")]) == 0
    stem = f"memory_SpR_alpha_0.5_{PAIR}_0_prompt_1"
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [f"{stem}.pdf", f"{stem}.png"]
    assert (
        plot_memory.main([str(tmp_path / "a"), "--out", str(tmp_path / "o"), "--prompt", "2"]) == 0
    )
    assert (
        plot_memory.main([str(tmp_path / "a"), "--out", str(tmp_path / "o"), "--prompt", "9"]) == 1
    )
    assert "no run has rounds with a rejection for prompt 9" in capsys.readouterr().err


def test_partial_scores_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finals of 5, 6, 7 are 10, 20, 30. At 8 tokens they had 5, 6, 7: rank correlation 1. At 16
    they had 3, 2, 4: ranks 1 0 2 against 0 1 2, 1 - 6 x 2/(3 x 8) = .5. The last round is final:
    not counted.
    """
    write_run(tmp_path / "a", "s", {1: [spr_object(1)], 2: [spr_object(2)]})
    assert plot_partial.main([str(tmp_path / "a"), "--out", str(tmp_path / "o")]) == 0
    with (tmp_path / "o" / f"partial_{PAIR}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["length"], row["prompts"], row["pairs"]) for row in rows] == [
        ("8", "2", "6"),
        ("16", "2", "6"),
    ]
    assert [float(row["rank_correlation"]) for row in rows] == pytest.approx([1, 0.5])
    assert (tmp_path / "o" / f"partial_{PAIR}.png").stat().st_size > 10_000
    assert "rank_correlation" in capsys.readouterr().out


def test_partial_without_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = make_archive(tmp_path / "a")
    assert plot_partial.main([str(archive), "--out", str(tmp_path / "o")]) == 1
    assert "no run has rounds with partial scores" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        ("want a list of objects", {"a": 1}),
        ("want a list of objects", [3]),
        ("candidates and scores do not belong together", [{"candidates": [1], "scores": []}]),
        ("candidates and scores do not belong together", [{"candidates": ["x"], "scores": [1]}]),
        ("candidates and scores do not belong together", [{"candidates": 3, "scores": 4}]),
        ("stop_length: want a count", [{"stop_length": -1}]),
        ("kv_bytes: want a count", [{"kv_bytes": 1.5}]),
        ("kept: want a count", [{"kept": "x"}]),
    ],
)
def test_bad_rounds_are_named(tmp_path: Path, caplog: Any, words: str, rounds: Any) -> None:
    with pytest.raises(ValueError, match=words):
        rounds_of({"rounds": rounds})
    write_run(tmp_path / "a", "bad", {1: [spr_object(1, rounds=rounds)]})
    write_run(tmp_path / "a", "good", {1: [spr_object(1, alpha=0.3)]})
    for script in (plot_memory, plot_partial):
        script.main([str(tmp_path / "a"), "--out", str(tmp_path / "o")])
        assert words in caplog.text
        caplog.clear()
    assert (tmp_path / "o" / f"memory_SpR_alpha_0.3_{PAIR}_0_prompt_1.png").is_file()


def test_scores_without_a_number_are_left_out() -> None:
    (found,) = rounds_of({"rounds": [a_round(0, 8, {1: None, 2: 0.5}, 1)]})
    assert (found.scores, found.rows) == ({2: 0.5}, 2)


def test_scores_of_a_prompt_count_once(tmp_path: Path) -> None:
    """Fault 18 again: a paper file with a row three times; ours by candidate and process."""
    folder = tmp_path / "Bo3_Gen_Rew_0"
    folder.mkdir()
    import json

    item = paper_object([1, 2, 3], 1)
    item["trajectories"] += [item["trajectories"][2]] * 2
    (folder / "Gen_Rew_prompt_0001.json").write_text(json.dumps([item]))
    (run,) = load_runs([tmp_path])
    assert sorted(plot_scores.scores_of(run, 1)) == [1, 2, 3]
    ours = write_run(
        tmp_path / "ours", "x", {1: [make_object(1, [1, 1, 2], 1, rank=r) for r in (0, 1)]}
    )
    (run,) = load_runs([ours])
    assert sorted(plot_scores.scores_of(run, 1)) == [1, 1, 1, 1, 2, 2]


def test_scores_picture(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    archive = make_archive(tmp_path / "a")
    assert plot_scores.main([str(archive), "--out", str(tmp_path / "o"), "--prompt", "2"]) == 0
    assert (tmp_path / "o" / f"scores_{PAIR}_prompt_2.png").stat().st_size > 10_000
    assert plot_scores.main([str(archive), "--out", str(tmp_path / "o"), "--prompt", "7"]) == 1
    assert "no prompt 7 in Bo8" in caplog.text


def overlaps(a: Any, b: Any) -> bool:
    return min(a.x1, b.x1) > max(a.x0, b.x0) and min(a.y1, b.y1) > max(a.y0, b.y0)


def test_labels_do_not_overlap() -> None:
    """Nine alphas close together along a curve: no label on another, none outside the frame."""
    plt = pictures.start(show=False)
    figure, ax = plt.subplots(figsize=(6, 4.5))
    x = np.geomspace(0.02, 0.1, 9)
    y = 95 + 4 * np.sin(np.linspace(0, 3, 9))
    ax.plot(x, y, "s--")
    pictures.log_axis(ax, [*x, 1.0])
    labels = [f"α = 0.{i}" for i in range(1, 10)]
    pictures.place_labels(ax, list(zip(x, y, strict=True)), labels, ["k"] * 9)
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in ax.texts]
    assert len(boxes) == 9
    assert not any(overlaps(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    frame = ax.get_window_extent(renderer)
    assert all(frame.x0 <= b.x0 and b.x1 <= frame.x1 for b in boxes)
    plt.close(figure)


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.1], [0.02, 1.0], [1e-4, 1.0], [1.0, 4096.0]])
def test_log_axis_has_a_few_readable_ticks(values: list[float]) -> None:
    plt = pictures.start(show=False)
    figure, ax = plt.subplots()
    ax.plot(values, values, "o")
    pictures.log_axis(ax, values)
    low, high = ax.get_xlim()
    assert low < min(values) <= max(values) < high
    ticks = [tick for tick in ax.get_xticks() if low <= tick <= high]
    assert 2 <= len(ticks) <= 10
    assert all(
        "e" not in label.get_text() or float(label.get_text()) < 1e-3
        for label in ax.get_xticklabels()
    )
    plt.close(figure)


def test_refill_is_a_curve_of_its_own(tmp_path: Path) -> None:
    """Issue 8: SpRF is a method of its own in every plot and file name."""
    archive = make_archive(tmp_path / "a")
    item = [make_object(1, [3.9], 2, **speculative(0.5, refill=True))]
    write_run(archive, "f", {1: item})
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    text = (tmp_path / "o" / f"{PAIR}.csv").read_text()
    assert "SpRF_alpha_0.5,0.5," in text


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("script", [plot_compare, plot_memory, plot_partial, plot_scores])
def test_a_closed_pipe_costs_no_file(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`| head -1`, with two pairs of models: the files of both are as without it."""
    archive = tmp_path / "a"
    for pair in ("Gen", "Other"):
        runs = {
            "b": [make_object(1, [0, 1, 2, 3], 5, llm_name=pair)],
            "s": [spr_object(1, llm_name=pair)],
        }
        for name, objects in runs.items():
            write_run(archive, f"{pair} {name}", {1: objects})
    assert script.main([str(archive), "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", ClosedPipe())
        assert script.main([str(archive), "--out", str(tmp_path / "cut")]) == 1
    assert "error: stdout: Broken pipe" in capsys.readouterr().err
    files = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("whole", "cut")]
    assert files[0] == files[1] and len(files[0]) >= 4


def test_a_closed_pipe_costs_no_early_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for idx in range(3) for line in made_up(idx, 1.0 + idx / 10, 8)]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", ClosedPipe())
        assert early_plot.main([str(results), "--out", str(tmp_path / "imgs")]) == 1
    assert capsys.readouterr().err == "error: stdout: Broken pipe\n"
    assert len(list((tmp_path / "imgs").iterdir())) == 2
