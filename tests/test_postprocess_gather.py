"""gather_best_ans.py and merge_json.py: the best answers, and what is left out by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from postprocess import gather_best_ans, merge_json
from tests.postprocess_archive import PAIR, make_archive, make_object, speculative, write_run


def test_answers_to_prompts_that_no_file_names_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The paper's files may hold a prompt's number alone: there is no instruction to judge."""
    item = make_object(3, [1.0, 2.0], 1)
    del item["prompt"]
    for trajectory in item["trajectories"]:
        del trajectory["prompt"]
    write_run(tmp_path / "archive", "nameless", {3: [item]})
    out = tmp_path / "results"
    assert gather_best_ans.main([str(tmp_path / "archive"), "--out", str(out)]) == 1
    assert "prompts with JSON_idx 3 left out, their files hold no prompt text" in caplog.text
    assert not list(out.glob("*.json"))


def test_gather_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best answers by hand: Bo8's are rank 1's candidate 3 (4) and rank 0's candidate 3 (2)."""
    archive, results, out = make_archive(tmp_path / "a"), tmp_path / "results", tmp_path / "w"
    assert gather_best_ans.main([str(archive), "--out", str(results)]) == 0
    rows = json.loads((results / f"Bo8_{PAIR}_0.json").read_text())
    assert [(row["JSON_idx"], row["score"], row["output"]) for row in rows] == [
        (1, 4, "answer 1.3"),
        (2, 2, "answer 0.3"),
    ]
    assert merge_json.main([str(results), "--out", str(out)]) == 0
    reference = json.loads((out / f"{PAIR}_ref.json").read_text())
    assert [row["generator"] for row in reference] == ["Bo8", "Bo8"]
    assert [row["instruction"] for row in reference] == ["Name a colour.", "Add 2 and 2."]
    compare = json.loads((out / f"{PAIR}_compare.json").read_text())
    names = ["Bo4", "SpR_alpha_0.1", "SpR_alpha_0.5", "SpR_alpha_0.9"]
    assert [row["generator"] for row in compare] == [name for name in names for _ in range(2)]
    assert all({"instruction", "output", "score", "generator"} <= row.keys() for row in compare)
    assert "2 instructions; Bo8" in capsys.readouterr().out


def test_merge_keeps_what_all_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing prompt and a repeated instruction are left out on both sides, by name."""
    same = {"JSON_idx": 3, "prompt": "Add 2 and 2."}
    for name, scores, indices in (("big", [1, 2, 3], (1, 2, 3)), ("small", [1, 2], (2, 3))):
        prompts = {idx: [make_object(idx, scores, 1)] for idx in indices}
        prompts[3] = [make_object(3, scores, 1, prompt=same)]
        write_run(tmp_path / "a", name, prompts)
    results = tmp_path / "r"
    gather_best_ans.main([str(tmp_path / "a"), "--out", str(results)])
    assert merge_json.main([str(results), "--out", str(tmp_path / "w")]) == 0
    for kind in ("compare", "ref"):
        rows = json.loads((tmp_path / "w" / f"{PAIR}_{kind}.json").read_text())
        assert [row["JSON_idx"] for row in rows] == [2]
    assert "prompts with JSON_idx 1 left out, another run lacks them" in caplog.text
    assert "prompts with JSON_idx 3 repeat an instruction" in caplog.text


def test_merge_seeds_and_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive, results, out = tmp_path / "a", tmp_path / "r", tmp_path / "w"
    write_run(archive, "b", {1: [make_object(1, [1, 2, 3], 1)]})
    for seed in (0, 1):
        item = make_object(1, [1.5], 1, seed=seed, **speculative(0.5))
        write_run(archive, f"s{seed}", {1: [item]})
    gather_best_ans.main([str(archive), "--out", str(results)])

    def generators(*flags: str) -> list[str]:
        assert merge_json.main([str(results), "--out", str(out), *flags]) == 0
        return [row["generator"] for row in json.loads((out / f"{PAIR}_compare.json").read_text())]

    assert generators() == ["SpR_alpha_0.5"]
    assert "SpR_alpha_0.5: seeds 1 left out" in caplog.text
    assert generators("--all_seeds") == ["SpR_alpha_0.5_seed_0", "SpR_alpha_0.5_seed_1"]
    assert generators("--base", "SpR_alpha_0.5") == ["Bo3"]
    assert merge_json.main([str(results), "--out", str(out), "--base", "Bo9"]) == 1


def test_reference_is_the_lowest_seed(tmp_path: Path) -> None:
    for seed in (8, 0, 4):
        write_run(tmp_path / "a", f"b{seed}", {1: [make_object(1, [1, 2, 3], 1, seed=seed)]})
    write_run(tmp_path / "a", "s", {1: [make_object(1, [1.5], 1, **speculative(0.5))]})
    gather_best_ans.main([str(tmp_path / "a"), "--out", str(tmp_path / "r")])
    assert merge_json.main([str(tmp_path / "r"), "--out", str(tmp_path / "w")]) == 0
    (row,) = json.loads((tmp_path / "w" / f"{PAIR}_ref.json").read_text())
    assert (row["generator"], row["seed"]) == ("Bo3", 0)


def test_bad_results_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('[{"instruction": 1}]')
    assert merge_json.main([str(tmp_path), "--out", str(tmp_path / "w")]) == 2
    assert "a.json: not valid JSON" in caplog.text
    assert "b.json: row 0: instruction is missing" in caplog.text


def test_lone_surrogates_survive(tmp_path: Path) -> None:
    """A text that UTF-8 can't hold goes through as it is."""
    item = make_object(1, [1, 2], 1)
    item["trajectories"][1]["output"] = "\ud83d and \u202e"
    write_run(tmp_path / "a", "x", {1: [item]})
    assert gather_best_ans.main([str(tmp_path / "a"), "--out", str(tmp_path / "r")]) == 0
    (row,) = json.loads((tmp_path / "r" / f"Bo2_{PAIR}_0.json").read_text())
    assert row["output"] == "\ud83d and \u202e"


def test_two_folders_of_one_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in ("a", "copy of a"):
        write_run(tmp_path / "x", folder, {1: [make_object(1, [1, 2], 1)]})
    assert gather_best_ans.main([str(tmp_path / "x"), "--out", str(tmp_path / "r")]) == 1
    assert "has the same method, models and seed" in caplog.text
