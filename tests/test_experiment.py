"""The paper's experiment, small, through the same script: the pool is what separate runs would be,
nothing is done twice, the tables hold every configuration and numbers worked out by hand."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest

import main as suite_main
from benchmarks import experiment, experiment_engine, experiment_report
from benchmarks.experiment_lines import Archive, claimed
from benchmarks.experiment_plan import FILES
from postprocess import plot_compare
from suite.settings import PROJECT

TEXTS = ("Why?", "How so?", "When, and where?")
ALPHAS = ("0.3", "0.5")
NAMES = [
    "pool", *(f"alpha {a} seed {s}" for s in (0, 1) for a in ALPHAS),
    "wave seed 0", "wave seed 1", "packed 16", "self pool", "self alpha 0.5", "partial",
    "alpha 0.5 read again",
]  # fmt: skip
ON_TWO = NAMES[5:]  # configurations of the first two prompts alone


@pytest.fixture(scope="module")
def command(tiny_models, tmp_path_factory):
    """Memory of 8 rows of 200 tokens, 56 pages; 27 of them the generator's, for 13 rows."""
    path = tmp_path_factory.mktemp("prompts") / "three.json"
    path.write_text(json.dumps([{"JSON_idx": i, "prompt": t} for i, t in enumerate(TEXTS)]))
    return [
        "--data_filename", str(path), "--model_dir", str(tiny_models),
        "--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward",
        "--max_tokens", "300", "--max_gen_tokens", "200",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def small(command):
    return [
        *command, "--pool", "16", "--block", "8", "--fit_rows", "8", "--self_pool", "8",
        "--alphas", *ALPHAS, "--self_alphas", "0.5", "--timed_prompts", "2",
        "--side_prompts", "2", "--full_prompts", "1", "--chunk_prompts", "2",
        "--reward_cache", "on",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    """The whole experiment by its shell script, and what it printed."""
    out = tmp_path_factory.mktemp("experiment") / "out"
    script = PROJECT / "benchmarks" / "reproduce.sh"
    env = {**os.environ, "PYTHON": suite_python(), "PART": "experiment"}
    data, *flags = small[1:]
    done = subprocess.run(
        ["bash", str(script), data, str(out), *flags], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def suite_python() -> str:

    return sys.executable


def lines_of(folder):
    found = [
        json.loads(line)
        for name in FILES
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    return {(line["JSON_idx"], line["config"]): line for line in found}


def real_run(command, tmp_path, *flags):
    """What main.py itself writes: the objects by JSON_idx."""
    argv = [*command, "--output_folder", str(tmp_path / "run"), "--num_prompts", "2", *flags]
    assert suite_main.main(argv) == 0
    files = sorted((tmp_path / "run").glob("*_prompt_*.json"))
    assert len(files) == 2
    return {item["prompt"]["JSON_idx"]: item for (item,) in map(json.loads, map(read, files))}


def read(path):
    return path.read_text()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_pool_is_what_best_of_n_runs_would_have_drawn(command, made, tmp_path, seed):
    lines = lines_of(made[0])
    runs = real_run(command, tmp_path, "--batch_size", "8", "--seed", str(seed))
    for idx, item in runs.items():
        pool = lines[idx, "pool"]
        assert pool["process_seeds"] == [0, 1]
        block = slice(8 * seed, 8 * seed + 8)
        assert pool["scores"][block] == [float(f"{t['score']:.9g}") for t in item["trajectories"]]
        assert pool["num_tokens"][block] == [t["num_tokens"] for t in item["trajectories"]]
        if (idx, f"wave seed {seed}") in lines:
            wave = lines[idx, f"wave seed {seed}"]
            best = max(item["trajectories"], key=lambda t: t["score"])
            assert wave["best"]["output"] == best["output"]
            assert wave["tokens_scored"] == item["tokens_scored"]


def test_speculative_rejection_is_what_main_runs(command, made, tmp_path):
    lines = lines_of(made[0])
    sessions = [json.loads(x) for x in (made[0] / "sessions.jsonl").read_text().splitlines()]
    memory = sessions[0]["memory"]["shared"]
    # 2 layers x 2 heads x 8 x (keys, values) x 4 bytes; 7 pages of 32 tokens for each of 8 rows.
    assert sessions[0]["just_fit_bytes"] == 2 * 2 * 8 * 2 * 4 * 7 * 32 * 8
    assert (memory["pages"], memory["keeps_reward_cache"]) == (27, True)
    assert sessions[0]["memory"]["other"]["rows_at_full_length"] == 8
    flags = ["--speculative_rejection", "--alpha", "0.5", "--seed", "1", "--reward_cache", "on"]
    runs = real_run(command, tmp_path, *flags, "--kv_cache_gb", str(memory["kv_cache_gb"]))
    for idx, item in runs.items():
        line = lines[idx, "alpha 0.5 seed 1"]
        best = max(item["trajectories"], key=lambda t: t["score"])
        assert line["best"]["output"] == best["output"]
        assert line["best"]["score"] == best["score"]
        assert line["start_rows"] == 13
        assert len(line["rounds"]) == len(item["rounds"]) > 1
        assert line["tokens_generated"] == item["tokens_generated"]


def test_survivors_are_members_of_the_pools_stream(made):
    """Rows 0 to 7 of seed 0 are the pool's first block: a survivor of them has its score."""
    lines = lines_of(made[0])
    met = 0
    for idx in range(3):
        best = lines[idx, "alpha 0.3 seed 0"]["best"]
        if best["candidate"] < 8:
            met += 1
            score = lines[idx, "pool"]["scores"][best["candidate"]]
            assert best["score"] == pytest.approx(score, abs=1e-5)
    assert met


def test_every_configuration_is_there_once_and_in_the_tables(made):
    out, printed = made
    order = experiment_order()
    wanted = {(idx, name) for idx in range(3) for name in NAMES if name not in ON_TWO}
    wanted |= {(idx, name) for idx in order[:2] for name in ON_TWO}
    assert set(lines_of(out)) == wanted
    assert sum(len(read(out / f"{f}.jsonl").splitlines()) for f in FILES) == len(wanted)
    for row in ("Best-of-8", "Best-of-16", *(f"alpha {a}, 6 runs" for a in ALPHAS),
                "alpha 0.5, reward cache on", "alpha 0.5, reward cache off"):  # fmt: skip
        assert f"| {row} |" in printed
    assert printed.count("| alpha | score | paper's account") == 2, (
        "the cache's question has its own"
    )
    numbers = json.loads(printed.splitlines()[-1])
    assert [row["n"] for row in numbers["best_of_n"]] == [8, 16]
    assert [row["alpha"] for row in numbers["rejection"]] == [0.3, 0.5]
    assert numbers["self_reward_prompts"] == 2
    assert numbers["num_prompts"] == 3
    for row in numbers["best_of_n"]:
        assert row["packed_seconds"] > 0 and row["paper_seconds"] > 0
    report = read(out / "report.md")
    assert "Rank correlation" in report and "| 64 |" in report
    for name in ("accounts", f"memory_SpR_alpha_0.5_tiny-llama_tiny-reward_0_prompt_{order[0]}"):
        assert (out / "imgs" / f"{name}.png").stat().st_size > 5000


def experiment_order():

    order = list(range(3))
    random.Random(experiment.ORDER_SEED).shuffle(order)
    return order


def test_the_export_is_an_ordinary_archive(command, made, tmp_path, capsys):
    """plot_compare's numbers for alpha 0.5 are those of the lines; winners have their text."""
    out, data = made[0], command[1]
    archive = tmp_path / "archive"
    argv = [str(out), "--no_pictures", "--export", str(archive), "--data_filename", data]
    assert experiment_report.main(argv) == 0
    lines = lines_of(out)
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "imgs")]) == 0
    with (tmp_path / "imgs" / "tiny-llama_tiny-reward.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"Bo8", "Bo16", *(f"SpR_alpha_{a}" for a in ALPHAS)}
    points = []
    for idx in range(3):
        pool = np.array(lines[idx, "pool"]["scores"])
        best = np.mean([lines[idx, f"alpha 0.5 seed {s}"]["best"]["score"] for s in (0, 1)])
        points.append(100 * (1 + (best - pool.max()) / np.ptp(pool)))
    assert float(rows["SpR_alpha_0.5"]["score"]) == pytest.approx(np.mean(points))
    both = [lines[i, f"alpha 0.5 seed {s}"]["tokens_scored"] for i in range(3) for s in (0, 1)]
    assert float(rows["SpR_alpha_0.5"]["tokens_scored"]) == sum(both) / 2
    (item,) = json.loads(read(next((archive / "Bo16_tiny-llama_tiny-reward_0").glob("*0001.json"))))
    winner = max(item["trajectories"], key=lambda t: t["score"])
    assert winner["output"] == lines[1, "pool"]["best"]["output"]


def test_a_finished_experiment_loads_no_model(small, made, monkeypatch, capsys):
    before = {name: read(made[0] / f"{name}.jsonl") for name in FILES}
    monkeypatch.setattr(experiment_engine, "Engine", None)
    assert experiment.main([*small, "--out", str(made[0])]) == 0
    assert {name: read(made[0] / f"{name}.jsonl") for name in FILES} == before
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_prompts"] == 3


def test_it_goes_on_where_it_was_stopped(small, made, tmp_path, capsys):
    """By a kill in the middle of a line, then by the clock; the end is the same."""
    copied(made[0], tmp_path)
    torn = tmp_path / "pool.jsonl"
    torn.write_bytes(torn.read_bytes()[:-40])
    rejection = tmp_path / "rejection.jsonl"
    kept = rejection.read_text().splitlines(keepends=True)[:-4]
    rejection.write_text("".join(kept))
    again = [*small, "--out", str(tmp_path), "--no_pictures"]
    whole = Archive(made[0]).done
    assert len(Archive(tmp_path).done) == len(whole) - 5
    assert experiment.main([*again, "--max_seconds", "0.01"]) == 0, "no prompt need be whole"
    assert "1 of 5 tasks" in capsys.readouterr().out
    assert len(Archive(tmp_path).done) == len(whole) - 4
    assert experiment.main(again) == 0
    mine = Archive(tmp_path).done
    assert {k: v["best"] for k, v in mine.items()} == {k: v["best"] for k, v in whole.items()}
    assert rejection.read_text().startswith("".join(kept)), "what was done is not done again"
    assert len(torn.read_text().splitlines()) == 4, "three lines and what is left of the torn one"


def copied(folder, target):
    for name in ("settings.json", "prompts.json", *(f"{file}.jsonl" for file in FILES)):
        shutil.copy(folder / name, target / name)


def test_the_archive_alone_is_enough_to_go_on(small, made, tmp_path):
    """The script unpacks what was kept in full before it packs the folder again."""
    copied(made[0], tmp_path)
    shutil.copy(made[0] / "full.tar.gz", tmp_path)
    data, *flags = small[1:]
    argv = [PROJECT / "benchmarks" / "reproduce.sh", data, tmp_path, *flags, "--no_pictures"]
    env = {**os.environ, "PYTHON": suite_python(), "PART": "experiment"}
    assert subprocess.run(argv, env=env, capture_output=True).returncode == 0
    with (
        tarfile.open(tmp_path / "full.tar.gz") as now,
        tarfile.open(made[0] / "full.tar.gz") as before,
    ):
        assert set(now.getnames()) == set(before.getnames()) and len(now.getnames()) > 3


def test_other_prompts_are_refused(small, made, tmp_path, capsys):
    """Same indices, one other text: to go on with, and to export with."""
    copied(made[0], tmp_path)
    other = tmp_path / "other.json"
    texts = [*TEXTS[:2], "When, or where?"]
    other.write_text(json.dumps([{"JSON_idx": i, "prompt": t} for i, t in enumerate(texts)]))
    known = read(tmp_path / "prompts.json")
    assert experiment.main([*small, "--out", str(tmp_path), "--data_filename", str(other)]) == 2
    assert "prompt 2 has another text" in capsys.readouterr().err
    assert read(tmp_path / "prompts.json") == known
    export = [str(tmp_path), "--no_pictures", "--export", str(tmp_path / "x")]
    assert experiment_report.main([*export, "--data_filename", str(other)]) == 2
    assert "prompt 2 has another text" in capsys.readouterr().err
    other.write_text(json.dumps([{"JSON_idx": 0, "prompt": TEXTS[0]}]))
    assert experiment_report.main([*export, "--data_filename", str(other)]) == 2
    assert "has no prompt with JSON_idx 1, 2" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_more_side_prompts_go_on_in_the_same_folder(small, made, tmp_path, capsys):
    """How many prompts are timed or asked the side questions may change, no other setting; what
    refuses the call leaves settings.json as it was."""
    copied(made[0], tmp_path)
    more = [*small, "--out", str(tmp_path), "--no_pictures", "--side_prompts", "3"]
    known = read(tmp_path / "settings.json")
    assert experiment.main([*more, "--self_pool", "7"]) == 2
    assert "holds another experiment: self_pool is 8 there, 7 now; give" in capsys.readouterr().err
    assert read(tmp_path / "settings.json") == known
    assert experiment.main([*more, "--chunk_prompts", "3"]) == 0
    before, after = lines_of(made[0]), lines_of(tmp_path)
    (last,) = {0, 1, 2} - {idx for idx, name in before if name == "partial"}
    added = {"self pool", "self alpha 0.5", "partial", "alpha 0.5 read again"}
    assert after.keys() - before.keys() == {(last, name) for name in added}
    assert before.items() <= after.items()
    grown = json.loads(known) | {"side_prompts": 3, "chunk_prompts": 3}
    assert json.loads(read(tmp_path / "settings.json")) == grown
    fewer = ["--side_prompts", "0", "--timed_prompts", "1", "--chunk_prompts", "3"]
    assert experiment.main([*more, *fewer]) == 0
    assert json.loads(read(tmp_path / "settings.json")) == grown, "as many lines are there"
    assert lines_of(tmp_path) == after


def test_results_of_unknown_origin_are_refused(small, made, tmp_path, capsys):
    copied(made[0], tmp_path)
    (tmp_path / "settings.json").unlink()
    assert experiment.main([*small, "--out", str(tmp_path)]) == 2
    assert "has results but no settings.json" in capsys.readouterr().err
    assert not (tmp_path / "settings.json").exists()


def test_a_folder_without_fingerprints_gets_them(small, made, tmp_path, caplog):
    copied(made[0], tmp_path)
    known = read(tmp_path / "prompts.json")
    (tmp_path / "prompts.json").unlink()
    assert experiment.main([*small, "--out", str(tmp_path), "--no_pictures"]) == 0
    assert "whether prompts are the same can't be told" in caplog.text
    assert read(tmp_path / "prompts.json") == known


def test_a_mistyped_first_command_claims_nothing(small, made, tmp_path, capsys):
    """A folder without an answer takes other settings and other prompts."""
    for name in ("settings.json", "prompts.json"):
        shutil.copy(made[0] / name, tmp_path / name)
    other = tmp_path / "other.json"
    other.write_text(json.dumps([{"JSON_idx": 0, "prompt": "What?"}]))
    wanted = [*small, "--out", str(tmp_path), "--data_filename", str(other), "--alphas", "0.3"]
    assert experiment.main([*wanted, "--llm_name", "nope"]) == 2
    assert "nope" in capsys.readouterr().err
    assert experiment.main([*wanted, "--max_seconds", "0.01"]) == 0
    assert json.loads(read(tmp_path / "settings.json"))["alphas"] == [0.3]
    assert len(Archive(tmp_path).done) == 1


@pytest.mark.parametrize("entry", ["{}", '{"just_fit_bytes": "x"}', "[]", "x"])
def test_a_damaged_session_is_not_read(made, tmp_path, entry, caplog):
    copied(made[0], tmp_path)
    shutil.copy(made[0] / "sessions.jsonl", tmp_path)
    whole = experiment_report.Report(Archive(tmp_path)).text()
    with (tmp_path / "sessions.jsonl").open("a") as file:
        file.write(entry + "\n")
    assert experiment_report.Report(Archive(tmp_path)).text() == whole


def test_a_report_that_can_not_be_written_is_one_line(made, tmp_path, capsys):
    copied(made[0], tmp_path)
    (tmp_path / "report.md").mkdir()
    assert experiment_report.main([str(tmp_path), "--no_pictures"]) == 2
    assert "report.md could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("side_prompts", "2"), ("chunk_prompts", None), ("timed_prompts", -3), ("fit_rows", 8.0),
     ("alphas", None), ("alphas", ["0.5"]), ("pool", True), ("side_prompts", math.nan)],
)  # fmt: skip
def test_a_damaged_size_is_said_by_name(small, made, tmp_path, capsys, name, wrong):
    """To go on with and to report on; the file stays as it is."""
    copied(made[0], tmp_path)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(json.loads(read(path)) | {name: wrong}))
    damaged = read(path)
    assert experiment.main([*small, "--out", str(tmp_path)]) == 2
    assert experiment_report.main([str(tmp_path)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(said) == 2 and all(f"settings.json is damaged: {name}" in line for line in said)
    assert read(path) == damaged


@pytest.mark.parametrize("content", ["", "[]", '{"pool": 8}', '{"pool": ', '{"top_k": "x"}'])
def test_a_damaged_settings_file_is_said(made, tmp_path, capsys, content):
    copied(made[0], tmp_path)
    (tmp_path / "settings.json").write_text(content)
    assert experiment_report.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "settings.json is damaged" in error


def test_settings_of_another_pool_make_no_table(made, tmp_path, caplog):
    copied(made[0], tmp_path)
    stored = json.loads(read(tmp_path / "settings.json"))
    (tmp_path / "settings.json").write_text(json.dumps(stored | {"pool": 3840, "block": 3840}))
    assert experiment_report.main([str(tmp_path)]) == 1
    assert "tells of other pools than 3 lines hold (the first: prompt" in caplog.text
    assert read(tmp_path / "report.md").startswith("0 prompts (left out: 3 whose pool has another")


@pytest.mark.parametrize("below", [".", "below"])
def test_a_file_in_the_place_of_the_folder_is_said(small, tmp_path, capsys, below):
    (tmp_path / "out").write_text("mine")
    assert experiment.main([*small, "--out", str(tmp_path / "out" / below)]) == 2
    assert "can't be made a folder (" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("flag", ["--fit_rows", "--self_pool"])
def test_caches_beyond_this_machine_are_refused_before_loading(
    small, tmp_path, capsys, monkeypatch, flag
):
    monkeypatch.setattr(experiment_engine, "load_model", None)
    assert experiment.main([*small, "--out", str(tmp_path), flag, "100000000"]) == 2
    error = capsys.readouterr().err
    assert "lower --fit_rows, --pool, --self_pool" in error and "must fit beside" in error


def test_a_folder_in_use_is_refused(small, made, capsys):
    with claimed(made[0]):
        assert experiment.main([*small, "--out", str(made[0])]) == 2
    assert f"in use by another run (process {os.getpid()}" in capsys.readouterr().err


def test_what_is_not_in_the_tables_is_said(made, tmp_path):
    copied(made[0], tmp_path)
    path = tmp_path / "pool.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] = {"JSON_idx": lines[0]["JSON_idx"], "config": "pool", "failed": "too long"}
    lines[1]["scores"] = [1.0] * len(lines[1]["scores"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = experiment_report.Report(Archive(tmp_path)).text()
    assert "1 prompts (left out: 1 that failed, 1 whose pool scores all alike);" in text


def test_a_part_without_a_whole_prompt_is_no_failure(small, tmp_path, capsys):
    argv = [*small, "--out", str(tmp_path), "--max_seconds", "0.01"]
    assert experiment.main(argv) == 0
    out = capsys.readouterr().out
    assert "run again" in out and "\n0 prompts;" in out
    assert len(Archive(tmp_path).done) == 1
    assert experiment_report.main([str(tmp_path)]) == 1, "of a report it is one"


def test_another_experiments_folder_is_refused(small, made, capsys):
    assert experiment.main([*small, "--out", str(made[0]), "--pool", "24"]) == 2
    assert "pool is 16 there, 24 now" in capsys.readouterr().err
    assert experiment.main([*small, "--out", str(made[0] / "x"), "--pool", "12"]) == 2
    assert "multiple of --block" in capsys.readouterr().err
    assert experiment_report.main([str(made[0] / "imgs")]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fit_rows", "0"], "--fit_rows must be at least 1, got 0"),
        (["--block", "0"], "--block must be at least 1, got 0"),
        (["--alphas"], "--alphas must be one or more, got none"),
        (["--alphas", "0.5", "0.50000001"], "got 0.5 0.5"),
        (["--seeds", "0", "0"], "--seeds must hold none twice, got 0 0"),
        (["--side_prompts", "-1"], "--side_prompts must be at least 0, got -1"),
        (["--num_prompts", "0"], "--num_prompts must be at least 1, got 0"),
        (["--full_prompts", "-2"], "--full_prompts must be at least 0, got -2"),
        (["--max_seconds", "nan"], "--max_seconds must be above 0, got nan"),
        (["--max_seconds", "0"], "--max_seconds must be above 0, got 0"),
        (["--self_alphas", "0.5", "0.5"], "--self_alphas must hold none twice, got 0.5 0.5"),
        (["--max_gen_tokens", "0"], "--max_gen_tokens"),
        (["--max_tokens", "-1"], "--max_tokens"),
        (["--dtype", "foo"], "--dtype"),
        (["--seeds", "-1"], "--seed"),
    ],
)
def test_sizes_that_are_none_are_refused(tmp_path, capsys, flags, words) -> None:
    out = tmp_path / "out"
    assert experiment.main(["--out", str(out), "--data_filename", "none.json", *flags]) == 2
    assert words in capsys.readouterr().err and not out.exists()


def test_the_script_says_its_usage() -> None:
    done = subprocess.run(
        [PROJECT / "benchmarks" / "reproduce.sh", "none.json"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("usage: reproduce.sh PROMPTS.json OUT")


def test_the_script_refuses_a_file_in_the_place_of_its_folder(tmp_path) -> None:
    (tmp_path / "out").write_text("mine")
    script = PROJECT / "benchmarks" / "reproduce.sh"
    done = subprocess.run([script, "none.json", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path / "out") in done.stderr
    assert (tmp_path / "out").read_text() == "mine"


def test_an_unknown_part_is_refused(tmp_path) -> None:
    script = PROJECT / "benchmarks" / "reproduce.sh"
    env = os.environ | {"PART": "experiments"}
    done = subprocess.run(
        [script, "none.json", tmp_path / "o"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "got experiments" in done.stderr
