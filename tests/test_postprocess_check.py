"""check.py: what is complete, missing, unreadable or mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postprocess import check
from postprocess.reading import shown
from tests.postprocess_archive import PAIR, make_archive, make_object, speculative, write_run


def test_check_of_a_good_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(make_archive(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "5 runs, 0 of them wrong" in out
    assert out.count("complete") == 5


def test_check_names_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = make_archive(tmp_path)
    bo4 = archive / f"Bo4_{PAIR}_0"
    next(bo4.glob("*0002.json")).unlink()
    whole = next((archive / f"Bo8_{PAIR}_0").glob("*0001.json"))
    whole.write_text(whole.read_text()[:-50])
    next((archive / f"SpR_alpha_0.1_{PAIR}_0").glob("*0001.json")).write_text("")
    mixed = next((archive / f"SpR_alpha_0.5_{PAIR}_0").glob("*0002.json"))
    mixed.write_text(mixed.read_text().replace('"max_tokens": 2048', '"max_tokens": 99'))
    (archive / f"SpR_alpha_0.9_{PAIR}_0" / "failures.jsonl").write_text('{"JSON_idx": 3}\n')
    assert check.main([str(archive)]) == 1
    out = capsys.readouterr().out
    assert f"Bo4_{PAIR}_0: missing: JSON_idx 2 (of the other runs)" in out
    assert f"Bo8_{PAIR}_0: unreadable: {PAIR}_prompt_0001.json: not valid JSON" in out
    assert f"SpR_alpha_0.1_{PAIR}_0: unreadable: {PAIR}_prompt_0001.json: empty" in out
    assert (
        f"SpR_alpha_0.5_{PAIR}_0: mixed: {PAIR}_prompt_0002.json: other settings: max_tokens" in out
    )
    assert f'SpR_alpha_0.9_{PAIR}_0: failed: {{"JSON_idx": 3}}' in out
    assert "5 runs, 5 of them wrong" in out


def test_check_counts_against_the_prompt_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"JSON_idx": i, "prompt": "x"} for i in (1, 2, 7)]))
    item = make_object(1, [1, 2], 1, data_filename=str(prompts))
    write_run(tmp_path / "a", "run", {1: [item]})
    assert check.main([str(tmp_path / "a")]) == 1
    assert f"missing: JSON_idx 2, 7 (of {shown(prompts)})" in capsys.readouterr().out
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(f'{{"JSON_idx": {i}, "prompt": "x"}}\n' for i in (1, 3)))
    write_run(tmp_path / "c", "run", {1: [{**item, "data_filename": str(lines)}]})
    assert check.main([str(tmp_path / "c")]) == 1
    assert f"missing: JSON_idx 3 (of {shown(lines)})" in capsys.readouterr().out
    write_run(tmp_path / "b", "run", {1: [{**item, "num_prompts": 1}]})
    assert check.main([str(tmp_path / "b")]) == 0


def test_check_lets_skipped_prompts_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault 16: a prompt over the bound is done; it is said, and not missing."""
    write_run(
        tmp_path,
        "run",
        {
            1: [make_object(1, [1, 2], 1)],
            2: [make_object(2, [], 0, skipped="2048 tokens", batch_size=2)],
        },
    )
    write_run(
        tmp_path,
        "other",
        {1: [make_object(1, [1, 2], 1, seed=1)], 2: [make_object(2, [1, 2], 1, seed=1)]},
    )
    assert check.main([str(tmp_path)]) == 0
    assert "skipped: " in capsys.readouterr().out


@pytest.mark.parametrize("fields", [{}, speculative(0.5)], ids=["Best-of-N", "rejection"])
def test_check_counts_what_the_run_asked_for_whatever_the_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any]
) -> None:
    """Two prompts at first, four in a resume: the most that was asked for counts."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"JSON_idx": i, "prompt": "x"} for i in range(1, 8)]))
    for idx, asked in ((1, 2), (2, 2), (3, 4)):
        more = {"data_filename": str(prompts), "num_prompts": asked, **fields}
        write_run(tmp_path / "a", "run", {idx: [make_object(idx, [1, 2], 1, **more)]})
    assert check.main([str(tmp_path / "a")]) == 1
    assert (
        f"run: missing: JSON_idx 4 (of the first 4 of {shown(prompts)})" in capsys.readouterr().out
    )
    whole = {"data_filename": str(prompts), "num_prompts": None, **fields}
    write_run(tmp_path / "a", "run", {4: [make_object(4, [1, 2], 1, **whole)]})
    assert check.main([str(tmp_path / "a")]) == 1
    assert f"run: missing: JSON_idx 5, 6, 7 (of {shown(prompts)})" in capsys.readouterr().out


@pytest.mark.parametrize("fields", [{}, speculative(0.5)], ids=["Best-of-N", "rejection"])
def test_check_goes_by_the_other_runs_where_the_prompt_file_is_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any]
) -> None:
    """A run that has as many as it asked for is complete, even where another has more."""
    gone = {"data_filename": "elsewhere.json"}
    large = {idx: [make_object(idx, [1, 2, 3], 1, **gone)] for idx in (1, 2, 3)}
    write_run(tmp_path, "large", large)
    asked = {**gone, "num_prompts": 2, **fields}
    for idx in (1, 2):
        write_run(tmp_path, "small", {idx: [make_object(idx, [1, 2], 1, **asked)]})
        assert check.main([str(tmp_path)]) == (1 if idx == 1 else 0)
        missing = "small: missing: JSON_idx 2, 3 (of the other runs, as elsewhere.json is not here)"
        assert (missing in capsys.readouterr().out) == (idx == 1)


def test_check_knows_one_prompt_file_by_two_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run resumed from another folder names the file differently; it is asked for once."""
    there = tmp_path / "there" / "q.json"
    large = {idx: [make_object(idx, [1, 2, 3], 1)] for idx in (1, 2, 3, 4)}
    write_run(tmp_path / "runs", "large", large)
    for idx, name, limit in ((1, str(there), 1), (2, "q.json", 3), (3, "q.json", 3)):
        item = make_object(idx, [1, 2], 1, data_filename=name, num_prompts=limit)
        write_run(tmp_path / "runs", "resumed", {idx: [item]})
    assert check.main([str(tmp_path / "runs")]) == 0, "all three that it asked for"
    there.parent.mkdir()
    there.write_text(json.dumps([{"JSON_idx": i, "prompt": "x"} for i in (1, 2, 8, 3)]))
    assert check.main([str(tmp_path / "runs")]) == 1
    assert "resumed: missing: JSON_idx 8 (of the first 3 of" in capsys.readouterr().out


def test_check_says_which_runs_it_did_not_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """archive/demo beside other runs; named, it is checked."""
    nested = write_run(tmp_path / "demo", "Best-of-8", {1: [make_object(1, [1, 2], 1)]})
    assert check.main([str(tmp_path)]) == 0
    assert "not checked" not in capsys.readouterr().out
    write_run(tmp_path, "mine", {1: [make_object(1, [1, 2], 1)]})
    assert check.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 runs, 0 of them wrong" in out
    assert f"not checked, since other runs lie nearer: {shown(nested, 300)}; name" in out
    assert check.main([str(tmp_path), str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    assert "2 runs, 0 of them wrong" in out and "not checked" not in out
