"""concat_json.py: larger runs out of runs with other seeds, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from postprocess import concat_json
from postprocess.runs import load_run
from tests.postprocess_archive import PAIR, make_object, speculative, write_run
from tests.test_postprocess_reading import paper_object


def seeded(archive: Path, seed: int, best: float, seconds: float = 3, **fields: object) -> Path:
    """Bo4: two processes x two candidates."""
    objects = [
        make_object(
            1, [0, best - rank], seconds + rank, rank=rank, seed=seed, num_processes=2, **fields
        )
        for rank in range(2)
    ]
    return write_run(archive, f"Bo4_{PAIR}_{seed}", {1: objects})


def test_concat_all_that_the_archive_holds(tmp_path: Path) -> None:
    """Four seeds of Bo4: x 2 (the lowest) and x 4. Eight objects are eight GPUs; the time is
    that of the slowest of all, 6 + 1; the best of all is 9.
    """
    for seed, best, seconds in ((0, 5, 3), (2, 9, 4), (4, 7, 5), (6, 1, 6)):
        seeded(tmp_path, seed, best, seconds)
    assert concat_json.main([str(tmp_path)]) == 0
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in folders if not name.startswith("Bo4")] == [
        f"Bo16_{PAIR}_0",
        f"Bo8_{PAIR}_0",
    ]
    run = load_run(tmp_path / f"Bo16_{PAIR}_0")
    assert (run.problems, run.name, run.num_gpus) == ([], f"Bo16_{PAIR}_0", 8)
    result = run.prompts[1]
    assert result.path.name == f"{PAIR}_prompt_0001.json"
    assert result.best is not None
    assert (result.best.score, result.elapsed_sec, result.tokens_generated) == (9, 7, 800)
    assert result.process_seeds == (0, 1, 2, 3, 4, 5, 6, 7)
    two = load_run(tmp_path / f"Bo8_{PAIR}_0").prompts[1]
    assert two.process_seeds == (0, 1, 2, 3)
    raw = json.loads(result.path.read_text())
    assert {item.pop("merged_from") for item in raw[2:4]} == {f"Bo4_{PAIR}_2"}
    assert raw[2:4] == json.loads((tmp_path / f"Bo4_{PAIR}_2" / result.path.name).read_text())


def test_concat_twice_changes_nothing(tmp_path: Path) -> None:
    for seed in (0, 2):
        seeded(tmp_path, seed, 5)
    assert concat_json.main([str(tmp_path)]) == 0
    path = tmp_path / f"Bo8_{PAIR}_0" / f"{PAIR}_prompt_0001.json"
    before = (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
    assert concat_json.main([str(tmp_path)]) == 0
    assert (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"Bo4_{PAIR}_0",
        f"Bo4_{PAIR}_2",
        f"Bo8_{PAIR}_0",
    ]


def test_concat_repairs_a_broken_target(tmp_path: Path) -> None:
    for seed in (0, 2):
        seeded(tmp_path, seed, 5)
    assert concat_json.main([str(tmp_path)]) == 0
    path = tmp_path / f"Bo8_{PAIR}_0" / f"{PAIR}_prompt_0001.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:99])
    assert concat_json.main([str(tmp_path)]) == 0
    assert path.read_bytes() == whole


def test_overlapping_seeds_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 25: seeds 0 and 1 with two processes share process seed 1."""
    seeded(tmp_path, 0, 5)
    seeded(tmp_path, 1, 5)
    assert concat_json.main([str(tmp_path)]) == 1
    assert not (tmp_path / f"Bo8_{PAIR}_0").exists()
    assert "share process seeds 1: candidates would count twice" in caplog.text


def test_same_run_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = seeded(tmp_path / "x", 0, 5)
    two = seeded(tmp_path / "y", 0, 5)
    target = tmp_path / "t"
    assert concat_json.main([str(one), str(two), "--target", str(target)]) == 1
    assert "share process seeds 0, 1" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(
    "setting", ["max_tokens", "temperature", "top_k", "prompt_template", "dtype"]
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    seeded(tmp_path, 0, 5)
    seeded(tmp_path, 2, 5, **{setting: 7})
    assert concat_json.main([str(tmp_path)]) == 1
    assert f"differ in {setting} (" in caplog.text
    assert not (tmp_path / f"Bo8_{PAIR}_0").exists()


def test_prompt_that_a_run_lacks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = seeded(tmp_path, 0, 5)
    seeded(tmp_path, 2, 5)
    item = [make_object(2, [0, 1], 1, rank=r, num_processes=2) for r in range(2)]
    (folder / f"{PAIR}_prompt_0002.json").write_text(json.dumps(item))
    assert concat_json.main([str(tmp_path)]) == 1
    assert f"prompts with JSON_idx 2 are missing in Bo4_{PAIR}_2, not merged" in caplog.text
    assert [p.name for p in (tmp_path / f"Bo8_{PAIR}_0").iterdir()] == [f"{PAIR}_prompt_0001.json"]


def test_a_real_run_is_never_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="postprocess")
    for seed in (0, 2):
        seeded(tmp_path, seed, 5)
    real = write_run(tmp_path, f"Bo8_{PAIR}_0", {1: [make_object(1, [1.0] * 8, 1)]})
    before = next(real.iterdir()).read_bytes()
    assert concat_json.main([str(tmp_path)]) == 0
    assert next(real.iterdir()).read_bytes() == before
    assert "is a run of its own" in caplog.text


def test_concat_named_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = (seeded(tmp_path, seed, 5) for seed in (0, 2, 4))
    assert concat_json.main([str(one), str(three), "--target", str(tmp_path / "mine")]) == 0
    assert load_run(tmp_path / "mine").prompts[1].process_seeds == (0, 1, 4, 5)
    assert concat_json.main([str(two), str(three)]) == 0
    assert (tmp_path / f"Bo8_{PAIR}_2").is_dir()
    spr = write_run(tmp_path, "s", {1: [make_object(1, [1], 1, **speculative(0.5))]})
    assert concat_json.main([str(one), str(spr)]) == 1
    assert "only Best-of-N runs are merged" in capsys.readouterr().err
    assert concat_json.main([str(one)]) == 1
    assert concat_json.main([str(one), str(two), "--target", str(one)]) == 1
    with pytest.raises(SystemExit) as usage:
        concat_json.main([str(tmp_path), "--times", "1"])
    assert usage.value.code == 2


def test_concat_of_the_papers_files(tmp_path: Path) -> None:
    """Process seeds are seed + rank; a NaN score becomes null, for our files are strict JSON."""
    for seed in (0, 8):
        folder = tmp_path / f"Bo240_Gen_Rew_{seed}"
        folder.mkdir()
        objects = [paper_object([1, math.nan], 2, seed=seed) for _ in range(2)]
        (folder / "Gen_Rew_prompt_0001.json").write_text(json.dumps(objects))
    assert concat_json.main([str(tmp_path)]) == 0
    path = tmp_path / f"Bo480_{PAIR}_0" / f"{PAIR}_prompt_0001.json"
    assert "NaN" not in path.read_text()
    result = load_run(path.parent).prompts[1]
    assert (result.process_seeds, result.num_unscored) == ((0, 1, 8, 9), 4)
    assert load_run(path.parent).method.name == "Bo480"


def test_no_seed_no_merge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in (0, 8):
        folder = tmp_path / f"Bo240_Gen_Rew_{seed}"
        folder.mkdir()
        (folder / "x_prompt_0001.json").write_text(json.dumps([paper_object([1, 2], 2, seed=None)]))
    assert concat_json.main([str(tmp_path)]) == 1
    assert "tell no seed" in caplog.text
