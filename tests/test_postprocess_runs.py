"""Runs of an archive: found, named by their fields, never mixed; and what check.py says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from postprocess import check, gather_best_ans
from postprocess.command import PROJECT, Nothing, Refused, write_text
from postprocess.runs import Method, choose_base, find_folders, load_run, load_runs
from tests.postprocess_archive import LLM, PAIR, make_archive, make_object, speculative, write_run
from tests.test_postprocess_reading import paper_object

SCRIPTS = [
    *("check.py", "concat_json.py", "eval_ppl.py", "gather_best_ans.py", "merge_json.py"),
    *("plot_compare.py", "plot_memory.py", "plot_partial.py", "plot_scores.py", "win_rate.py"),
]


def test_names_come_from_the_fields(tmp_path: Path) -> None:
    """Not from the folder's name, which a user may choose."""
    make_archive(tmp_path)
    for number, folder in enumerate(sorted(tmp_path.iterdir())):
        folder.rename(tmp_path / f"mine{number}")
    names = [run.name for run in load_runs([tmp_path])]
    assert names == [
        f"Bo4_{PAIR}_0",
        f"Bo8_{PAIR}_0",
        f"SpR_alpha_0.1_{PAIR}_0",
        f"SpR_alpha_0.5_{PAIR}_0",
        f"SpR_alpha_0.9_{PAIR}_0",
    ]


@pytest.mark.parametrize(
    ("fields", "name", "label"),
    [
        ({}, "Bo2", "2"),
        (speculative(0.5), "SpR_alpha_0.5", "0.5"),
        (speculative(0.3), "SpR_alpha_0.3", "0.3"),
        (speculative("auto"), "SpR_alpha_auto", "auto"),
        (speculative(0.7, keep_fraction=0.3), "SpR_alpha_0.7", "0.7"),
        (speculative(0.5, refill=True), "SpRF_alpha_0.5", "0.5"),
        (speculative(0.5, schedule="halving"), "SpR_alpha_0.5_halving", "0.5 halving"),
        (speculative(0.5, schedule="memory", min_tokens=0), "SpR_alpha_0.5", "0.5"),
        (speculative(0.5, schedule="fixed:64"), "SpR_alpha_0.5_fixed64", "0.5 fixed64"),
        (speculative(0.5, min_tokens=16), "SpR_alpha_0.5_min16", "0.5 min16"),
        (speculative(0.5, refill=True, value_head="v.st"), "SpRF_alpha_0.5_vh", "0.5 vh"),
    ],
)
def test_method_names(tmp_path: Path, fields: dict, name: str, label: str) -> None:
    folder = write_run(tmp_path, "any", {1: [make_object(1, [0, 1], 1, **fields)]})
    run = load_run(folder)
    assert (run.method.name, run.method.label) == (name, label)
    assert run.problems == []


@pytest.mark.parametrize(
    ("folder", "method", "llm", "reward", "seed"),
    [
        (
            "Bo120_Meta-Llama-3-8B_ArmoRM-Llama3-8B-v0.1_0",
            "Bo120",
            "Meta-Llama-3-8B",
            "ArmoRM-Llama3-8B-v0.1",
            0,
        ),
        (
            "SpR_alpha_0.5_Mistral-7B-v0.3_RM-Mistral-7B_8",
            "SpR_alpha_0.5",
            "Mistral-7B-v0.3",
            "RM-Mistral-7B",
            8,
        ),
        ("SpRF_alpha_auto_a_b_1", "SpRF_alpha_auto", "a", "b", 1),
        ("SpR_alpha_0.9_my_model_my_model_0", "SpR_alpha_0.9", "my-model", "my-model", 0),
    ],
)
def test_folder_name_is_the_fallback(
    tmp_path: Path, folder: str, method: str, llm: str, reward: str, seed: int
) -> None:
    """Files without argument fields. `my_model` twice is self-reward: cut in the middle."""
    bare = {
        key: value
        for key, value in paper_object([1, 2], 3).items()
        if key in ("trajectories", "clock", "elapsed_sec")
    }
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "x_prompt_0000.json").write_text(json.dumps([bare]))
    run = load_run(tmp_path / folder)
    found = (run.method.name, run.llm.replace("_", "-"), run.reward.replace("_", "-"), run.seed)
    assert found == (method, llm, reward, seed)


@pytest.mark.parametrize("name", ["stuff", "Bo4_a_b_c_0", "SpR_alpha_1.2.3_a_b_0", "Bo0_a_b_0"])
def test_folder_that_tells_nothing_is_a_named_problem(tmp_path: Path, name: str) -> None:
    bare = {"trajectories": [], "elapsed_sec": 1}
    (tmp_path / name).mkdir()
    (tmp_path / name / "x_prompt_0000.json").write_text(json.dumps([bare]))
    run = load_run(tmp_path / name)
    assert run.prompts == {}
    assert [problem.kind for problem in run.problems] == ["mixed"]


@pytest.mark.parametrize(
    ("scores", "batch_size", "folder", "gpus"),
    [
        # Fault 24: the paper's scripts gave 100 // 120 = 0 GPUs.
        (100, 100, "Bo100", 1),
        (100, None, "Bo100", 1),
        (3, 120, "Bo120", 1),
        # All answers of eight processes in one object: N of the folder's name over rows a GPU.
        (960, 120, "Bo960", 8),
        (960, None, "Bo960", 8),
        (130, None, "Bo130", 2),
    ],
)
def test_gpus_of_one_object(
    tmp_path: Path, scores: int, batch_size: int | None, folder: str, gpus: int
) -> None:
    item = paper_object([float(i) for i in range(scores)], 3, batch_size=batch_size)
    where = tmp_path / f"{folder}_a_b_0"
    where.mkdir()
    (where / "x_prompt_0000.json").write_text(json.dumps([item]))
    run = load_run(where)
    assert (run.num_gpus, run.method.name) == (gpus, folder)


def test_gpus_are_the_objects(tmp_path: Path) -> None:
    """Whatever the folder is called."""
    objects = [make_object(1, [1, 2], 1, rank=rank) for rank in range(3)]
    run = load_run(write_run(tmp_path, "Bo960_a_b_0", {1: objects}))
    assert (run.num_gpus, run.method.name) == (3, "Bo6")


def test_folder_of_two_settings_has_no_prompts(tmp_path: Path) -> None:
    """Fault 21: never a table of half one alpha and half another."""
    prompts = {
        1: [make_object(1, [1, 2], 1, **speculative(0.5))],
        2: [make_object(2, [1, 2], 1, **speculative(0.9))],
    }
    run = load_run(write_run(tmp_path, "x", prompts))
    assert run.prompts == {}
    assert "alpha (0.5 against 0.9)" in run.problems[0].text


def test_harmless_settings_may_differ_in_a_folder(tmp_path: Path) -> None:
    """What suite.settings lets a run be resumed with: no other result comes of it."""
    prompts = {
        1: [make_object(1, [1, 2], 1, num_prompts=1, model_dir="/a")],
        2: [make_object(2, [1, 2], 1, num_prompts=2, model_dir="/b")],
    }
    assert len(load_run(write_run(tmp_path, "x", prompts)).prompts) == 2


def test_other_files_are_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", {1: [make_object(1, [1, 2], 1)]})
    for name in ("notes.json", ".lock", "x_prompt_0001.json.tmp", "x_prompt_abc.json"):
        (folder / name).write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("x")
    run = load_run(folder)
    assert (len(run.prompts), run.problems) == (1, [])
    assert find_folders([tmp_path]) == [folder]


def test_runs_one_level_deeper(tmp_path: Path) -> None:
    """After `make demo` the archive holds only archive/demo/: found, until there are others."""
    nested = write_run(tmp_path / "demo", "x", {1: [make_object(1, [1, 2], 1)]})
    assert find_folders([tmp_path]) == [nested]
    own = write_run(tmp_path, "y", {1: [make_object(1, [1, 2], 1)]})
    assert find_folders([tmp_path]) == [own]
    assert find_folders([tmp_path / "demo", own]) == [nested, own]


def test_missing_and_empty_archive(tmp_path: Path) -> None:
    with pytest.raises(Nothing, match="no folder"):
        find_folders([tmp_path / "gone"])
    with pytest.raises(Nothing, match="no runs"):
        find_folders([tmp_path])


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_says_that_there_is_nothing(tmp_path: Path, script: str) -> None:
    """As the user types it, from the project: exit code 2, one line, no traceback."""
    flag = {"merge_json.py": [str(tmp_path)], "win_rate.py": ["--out", str(tmp_path)]}
    command = [sys.executable, f"postprocess/{script}", *flag.get(script, [str(tmp_path)])]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: no ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_import_does_nothing(script: str) -> None:
    """No work, no heavy package at import."""
    name = script.removesuffix(".py")
    code = (
        f"import sys; import postprocess.{name}; "
        "heavy = 'torch', 'matplotlib', 'alpaca_eval', 'transformers'; "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_base_is_the_largest_best_of_n(tmp_path: Path) -> None:
    runs = load_runs([make_archive(tmp_path)])
    assert choose_base(runs, None).method == Method("Bo", n=8)
    assert choose_base(runs, "SpR_alpha_0.5").method.alpha == 0.5
    with pytest.raises(Refused, match="no such run; there is Bo4_"):
        choose_base(runs, "Bo5")


def failed_run(archive: Path, name: str) -> Path:
    """Every prompt failed: main.py leaves failures.jsonl and locks."""
    folder = archive / name
    folder.mkdir(parents=True)
    lines = [{"JSON_idx": idx, "prompt": "Why?", "reason": "out of memory"} for idx in (1, 2)]
    (folder / "failures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / ".lock").write_text("")
    return folder


def test_run_where_every_prompt_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name of one's own, so only failures.jsonl tells that it is a run."""
    archive = make_archive(tmp_path / "a")
    folder = failed_run(archive, "mine")
    for places, runs in ((archive, 6), (folder, 1)):
        assert check.main([str(places)]) == 1
        out = capsys.readouterr().out
        (row,) = [line.split() for line in out.splitlines() if line.startswith("mine ")]
        assert row == ["mine", "?", "0", "1", "0", "0", "0", "2", "0", "0", "wrong"]
        assert f"{runs} runs, 1 of them wrong" in out
        assert "mine: failed: " in out and "out of memory" in out and "mine: mixed" not in out


def test_others_leave_a_failed_run_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = make_archive(tmp_path / "a")
    failed_run(archive, "mine")
    assert gather_best_ans.main([str(archive), "--out", str(tmp_path / "r")]) == 0
    assert len(list((tmp_path / "r").iterdir())) == 5
    assert "mine: left out, no usable prompt" in caplog.text


def test_a_failed_run_hides_no_others(tmp_path: Path) -> None:
    """Neither the runs below it nor those a level further down (archive/demo/)."""
    failed_run(tmp_path, "mine")
    (tmp_path / "failures.jsonl").write_text("{}\n")
    make_archive(tmp_path / "demo")
    failed_run(tmp_path / "demo", "theirs")
    names = [folder.name for folder in find_folders([tmp_path])]
    assert len(names) == 8 and {"mine", "theirs", tmp_path.name} < set(names)
    assert len(load_runs([tmp_path])) == 5


def test_score_beyond_the_bound_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "x", {1: [make_object(1, [1, 2e100, -2e100], 1)]})
    assert check.main([str(tmp_path)]) == 0
    said = "2 of 3 trajectories ignored, no finite score (beyond 1e+100 on either side counts as"
    assert said in capsys.readouterr().out


def test_names_from_files_cannot_leave_their_folder(tmp_path: Path) -> None:
    """Trust: a model's name is only ever a file name's part."""
    item = make_object(1, [1, 2], 1, llm_name="../../etc/passwd", reward_model_name="..")
    write_run(tmp_path / "a", "x", {1: [item]})
    assert gather_best_ans.main([str(tmp_path / "a"), "--out", str(tmp_path / "r")]) == 0
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["Bo2_passwd_model_0.json"]


def test_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_text(path, "one")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        write_text(path, "two")
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's error for a write names none, and must not pass for stdout's."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    archive = make_archive(tmp_path / "a")
    monkeypatch.setattr(Path, "write_text", fail)
    assert gather_best_ans.main([str(archive), "--out", str(tmp_path / "r")]) == 1
    assert f"Bo4_{PAIR}_0.json: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_stdout_that_takes_nothing(tmp_path: Path, kind: str, unbuffered: str) -> None:
    """One line, also where the text is only sent when the script ends."""
    write_run(tmp_path, "x", {1: [make_object(1, [1, 2], 1)]})
    if kind == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    command = [sys.executable, str(PROJECT / "postprocess" / "check.py"), str(tmp_path)]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    try:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)
    finally:
        os.close(stdout)
    said = {"full": "No space left on device", "closed": "Broken pipe"}[kind]
    assert (done.returncode, done.stderr) == (1, f"error: stdout: {said}\n")


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    archive = make_archive(tmp_path / "a")
    code = gather_best_ans.main([str(archive), "--out", str(tmp_path / "taken")])
    assert code == 1
    assert "error: " in capsys.readouterr().err


def test_llm_name_is_a_base_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "x", {1: [make_object(1, [1], 1, llm_name=f"org/sub/{LLM}/")]})
    assert load_run(folder).llm == LLM
