"""Runs of an archive: found, named by their fields, never mixed; and what check.py says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from postprocess import check, gather_best_ans, merge_json
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
    assert f"Bo4_{PAIR}_0: missing: 2 (of the other runs)" in out
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
    assert f"missing: 2, 7 (of {prompts})" in capsys.readouterr().out
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(f'{{"JSON_idx": {i}, "prompt": "x"}}\n' for i in (1, 3)))
    write_run(tmp_path / "c", "run", {1: [{**item, "data_filename": str(lines)}]})
    assert check.main([str(tmp_path / "c")]) == 1
    assert f"missing: 3 (of {lines})" in capsys.readouterr().out
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
    assert "prompts 3 left out, their files hold no prompt text" in caplog.text
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
    assert "prompts 1 left out, another run lacks them" in caplog.text
    assert "prompts 3 repeat an instruction" in caplog.text


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
