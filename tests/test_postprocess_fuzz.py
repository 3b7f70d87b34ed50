"""Mutated files through every reader of postprocess/: a named error or a right answer, nothing
else.

For each reader some hundred files, and 10,000 in the long version; prompt files are judged by an
oracle that knows only JSON and max(). Then whole archives through the scripts' own main(). Fixed
seeds: a failure repeats.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postprocess import (
    check,
    concat_json,
    gather_best_ans,
    judging,
    merge_json,
    plot_compare,
    plot_memory,
    plot_partial,
    plot_scores,
    win_rate,
)
from postprocess.command import Nothing, Refused
from postprocess.plot_memory import teeth
from postprocess.reading import BadFile, load_objects, read_prompt
from postprocess.rounds import partials_of, rounds_of
from postprocess.runs import load_run
from suite.prompts import load_prompts
from tests.mutation import each_reader, encode, mutated
from tests.postprocess_archive import PAIR, make_archive, make_object, write_run
from tests.test_postprocess_pictures import spr_object
from tests.test_postprocess_reading import paper_object

NAME = f"{PAIR}_prompt_0001.json"


def sources() -> list[Any]:
    partials = {"8": [[0, 0.5], [1, 1.5], [2, None]], "16": [[0, 1.0], [1, 2.0]]}
    return [
        [make_object(1, [0, 1, 2], 10), make_object(1, [3, 1, 4], 12, rank=1)],
        [make_object(1, [0, 1, 2], 10, partials=partials)],
        [spr_object(1)],
        [paper_object([1, 2, math.nan], 4), paper_object([2, 2], 5)],
    ]


def usable(score: Any) -> bool:
    if isinstance(score, bool) or not isinstance(score, int | float):
        return False
    return not isinstance(score, float) and abs(score) <= 1e100 or abs(score) <= 1e100


def oracle(data: bytes) -> tuple[Any, ...]:
    """Best, worst and number of scores, seconds and processes, by JSON and max() alone."""
    objects = json.loads(data)
    scores = [
        row["score"] for item in objects for row in item["trajectories"] if usable(row["score"])
    ]
    seconds = max(item["elapsed_sec"] for item in objects)
    return max(scores, default=None), min(scores, default=None), len(scores), seconds, len(objects)


def read_details(item: dict[str, Any], number: int) -> None:
    """Rounds and partial scores of an object that was read: named errors or sane numbers."""
    try:
        rounds, partials = rounds_of(item), partials_of(item)
    except ValueError as error:
        assert str(error).startswith(("rounds: ", "partials: ")), (number, error)
        return
    assert all(math.isfinite(s) for scores in partials.values() for s in scores.values())
    rejections = [r for r in rounds if not r.final and r.rows]
    if rejections:
        assert all(rows >= 0 and used >= 0 for _, rows, used in teeth(item, rejections).corners)


def fuzz_files(folder: Path, seed: int, num_files: int) -> None:
    rng = random.Random(seed)
    path = folder / NAME
    starts = sources()
    read = refused = 0
    for number in range(num_files):
        data = mutated(rng.choice(starts), rng)
        path.write_bytes(data)
        try:
            result = read_prompt(path)
        except BadFile as error:
            message = str(error)
            assert NAME in message and len(message) < 2000, (number, message)
            assert message.isprintable(), (number, message)
            refused += 1
            continue
        best = result.best.score if result.best is not None else None
        scored = result.num_trajectories - result.num_unscored
        found = (best, result.worst_score, scored, result.elapsed_sec, result.num_objects)
        assert found == oracle(data), (number, data)
        read += 1
        for item in load_objects(path):
            read_details(item, number)
    # Both ends of the reader are exercised, not one of them alone.
    assert read > num_files / 10
    assert refused > num_files / 4


@pytest.mark.parametrize("num_files", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_record_files(tmp_path: Path, num_files: int) -> None:
    fuzz_files(tmp_path, seed=20240610, num_files=num_files)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_two_hundred_thousand_files(tmp_path: Path, seed: int) -> None:
    fuzz_files(tmp_path, seed=seed, num_files=10_000)


def spoil(archive: Path, rng: random.Random) -> None:
    """One to four files of an archive."""
    files = sorted(archive.rglob("*.json"))
    for path in rng.sample(files, rng.choice((1, 1, 2, 4))):
        path.write_bytes(mutated(json.loads(path.read_bytes()), rng))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are under test here; drawing takes half a second a picture."""
    monkeypatch.setattr(plot_compare, "draw", lambda *_: [])
    monkeypatch.setattr(plot_memory, "draw", lambda *_: [])
    monkeypatch.setattr(plot_partial, "draw", lambda *_: [])
    monkeypatch.setattr(plot_scores, "draw", lambda *_: [])


@pytest.mark.usefixtures("no_pictures")
def test_archives_through_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """150 spoiled archives: every script ends with a code and a message, and no table holds a
    NaN.
    """
    rng = random.Random(7)
    codes: set[tuple[str, int]] = set()
    for number in range(150):
        folder = tmp_path / str(number)
        archive = make_archive(folder / "a")
        for seed in (8, 9):
            both = {i: [make_object(i, [0, 1, 2, 3], 5, seed=seed)] for i in (1, 2)}
            write_run(archive, f"Bo4_{PAIR}_{seed}", both)
        rounds = {idx: [spr_object(idx, alpha=0.3)] for idx in (1, 2)}
        write_run(archive, "rounds", rounds)
        spoil(archive, rng)
        out = folder / "o"
        lines: list[tuple[Callable[[list[str]], int], list[str]]] = [
            (check.main, [str(archive)]),
            (concat_json.main, [str(archive)]),
            (plot_compare.main, [str(archive), "--out", str(out)]),
            (plot_memory.main, [str(archive), "--out", str(out)]),
            (plot_partial.main, [str(archive), "--out", str(out)]),
            (plot_scores.main, [str(archive), "--out", str(out)]),
            (gather_best_ans.main, [str(archive), "--out", str(folder / "r")]),
            (merge_json.main, [str(folder / "r"), "--out", str(folder / "w")]),
        ]
        for main, flags in lines:
            code = main(flags)
            assert code in (0, 1, 2), (number, main)
            codes.add((main.__module__, code))
        for path in out.glob("*.csv"):
            text = path.read_text()
            assert "nan" not in text.lower() and "inf" not in text.lower(), (number, text)
        for path in folder.rglob("Bo*/*.json"):
            if "merged_from" in (text := path.read_text(errors="replace")):
                assert "NaN" not in text and "Infinity" not in text
    capsys.readouterr()
    assert ("postprocess.check", 0) in codes and ("postprocess.check", 1) in codes


def test_a_spoiled_file_changes_no_other_prompt(tmp_path: Path) -> None:
    """Prompt 2 of a run says the same whatever became of prompt 1, unless the run is mixed by
    it.
    """
    rng = random.Random(11)
    folder = make_archive(tmp_path) / f"Bo8_{PAIR}_0"
    before = load_run(folder).prompts[2]
    first = folder / NAME
    whole = json.loads(first.read_text())
    kept = 0
    for _ in range(300):
        first.write_bytes(mutated(whole, rng))
        run = load_run(folder)
        if 2 in run.prompts:
            assert run.prompts[2] == before
            kept += 1
        else:
            assert {"mixed"} <= {problem.kind for problem in run.problems}
    assert kept > 150


def result_rows() -> list[dict[str, Any]]:
    return [
        {
            "JSON_idx": idx,
            "instruction": f"Say {idx}.",
            "output": "text",
            "score": 1.5,
            "generator": "Bo8",
            "llm": "L",
            "reward": "R",
            "seed": 0,
        }
        for idx in (1, 2)
    ]


@each_reader
def test_result_files(tmp_path: Path, num_files: int) -> None:
    """Spoiled files of gather_best_ans.py, for merge_json.py and for the judge."""
    rng = random.Random(5)
    path = tmp_path / "x.json"
    read = 0
    for number in range(num_files):
        path.write_bytes(mutated(result_rows(), rng))
        try:
            (files,) = merge_json.load_results(tmp_path).values()
        except Nothing:
            pass
        else:
            assert merge_json.unique(files[0]), number
            read += 1
        try:
            rows = win_rate.load_rows(path)
        except (BadFile, Refused) as error:
            assert "x.json" in str(error) and str(error).isprintable()
            continue
        assert isinstance(win_rate.faults(rows, result_rows()), list)
        assert isinstance(win_rate.length_faults(rows, result_rows()), list)
    assert num_files / 20 < read < num_files * 19 / 20


@each_reader
def test_prompt_files(tmp_path: Path, num_files: int) -> None:
    rng, path = random.Random(6), tmp_path / "p.json"
    entries = [{"JSON_idx": i, "prompt": f"p{i}", "more": [i, None]} for i in range(3)]
    read = 0
    for number in range(num_files):
        data = mutated(entries, rng)
        path.write_bytes(data)
        try:
            prompts = load_prompts(str(path))
        except ValueError as error:
            assert "p.json" in str(error) and len(str(error)) < 2000, number
            continue
        stored = json.loads(data)
        assert [p.prompt for p in prompts] == [entry["prompt"] for entry in stored], number
        assert len({p.json_idx for p in prompts}) == len(prompts)
        read += 1
    assert num_files / 20 < read < num_files * 19 / 20


def metrics_rows() -> list[dict[str, Any]]:
    numbers = {"win_rate": 61.5, "standard_error": 3.25, "n_total": 2, "avg_length": 4.0}
    more = {"length_controlled_winrate": None, "lc_standard_error": None, "n_draws": 0.0}
    return [{"generator": name, **numbers, **more} for name in ("Bo8", "SpR_alpha_0.5")]


@each_reader
def test_what_the_judge_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, num_files: int
) -> None:
    """Spoiled metrics through win_rate.py: a table of numbers as they stood, or a named error."""
    for name, generators in (("compare", ("Bo8", "SpR_alpha_0.5")), ("ref", ("Bo4",))):
        rows = [{**row, "generator": g} for g in generators for row in result_rows()]
        (tmp_path / f"x_{name}.json").write_bytes(encode(rows))
    rng, written = random.Random(8), 0

    class Child:
        """Ends well, and leaves a spoiled file."""

        returncode, stdout = 0, ()

        def __init__(self, command: list[str], **_: Any) -> None:
            job = json.loads(Path(command[-1]).read_text())
            Path(job["folder"], "metrics.json").write_bytes(data)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(judging.subprocess, "Popen", Child)
    monkeypatch.setattr(win_rate, "draw", lambda *_: [])
    line = ["--out", str(tmp_path), "--judge", "scores", "--metric", "raw"]
    for number in range(num_files):
        data = mutated(metrics_rows(), rng)
        code = win_rate.main(line)
        assert code in (0, 1), number
        found = list(tmp_path.glob("*/leaderboard.csv"))
        assert len(found) == (code == 0), number
        for path in found:
            stored = {row["generator"]: row for row in json.loads(data)}
            with path.open() as file:
                for row in csv.DictReader(file):
                    assert row["win_rate"] == str(stored[row["generator"]]["win_rate"]), number
                    assert 0 <= float(row["win_rate"]) <= 100 and row["n_total"] == "2", number
            written += 1
    assert "Traceback" not in capsys.readouterr().err
    assert num_files / 20 < written < num_files * 19 / 20


@each_reader
def test_the_judges_cache(tmp_path: Path, num_files: int) -> None:
    """Only judgements that are whole stay; the others are asked for again."""
    rng, path, kept = random.Random(9), tmp_path / "cache.json", 0
    texts = {"instruction": "i", "output_1": "a", "output_2": "b", "annotator": "j"}
    rows = [{**texts, "instruction": f"i{n}", "preference": 1 + n / 4} for n in range(4)]
    for number in range(num_files):
        data = mutated([*rows, {**texts, "preference": -1}], rng)
        path.write_bytes(data)
        try:
            judging.forget_failures(path)
        except BadFile as error:
            assert "cache.json" in str(error) and "--fresh" in str(error), number
            continue
        left = json.loads(path.read_text()) if path.exists() else []
        for row in left:
            assert row in json.loads(data), number
            assert all(isinstance(row[key], str) for key in texts), number
            assert 0 <= row["preference"] <= 2, number
        kept += len(left)
    assert kept > num_files


@pytest.mark.usefixtures("no_pictures")
def test_numbers_at_the_edge_of_float(tmp_path: Path) -> None:
    """Huge and tiny scores and times: finite cells or empty ones."""
    edges = [1e100, -1e100, 1e99, 1e-100, 5e-324, 0.0, 1.0]
    for number, (low, high) in enumerate((a, b) for a in edges for b in edges):
        archive = tmp_path / str(number)
        write_run(archive, "b", {1: [make_object(1, [low, high, 0.5], 1e12)]})
        write_run(archive, "c", {1: [make_object(1, [high, low], 5e-324)]})
        code = plot_compare.main([str(archive), "--out", str(archive / "o")])
        assert code in (0, 1)
        for path in (archive / "o").glob("*.csv"):
            with path.open() as file:
                for row in csv.DictReader(file):
                    assert all(math.isfinite(float(row[k])) for k in ("score", "seconds") if row[k])
