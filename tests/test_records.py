"""A run's folder: whole files, resume, refusal, locks, failures, and a hundred thousand prompts."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from suite.files import FolderLock, InUse, dumps_strict, write_whole
from suite.prompts import Prompt
from suite.records import FolderRefused, NotJson, NotWritten, RunFolder
from suite.settings import PROJECT, Settings, settings_for_record

SETTINGS = Settings(llm_name="owner/Tiny-1", reward_model_name="RM-2", batch_size=2)


def prompts(number: int) -> list[Prompt]:
    return [Prompt(i, f"p{i}", {"JSON_idx": i, "prompt": f"p{i}"}) for i in range(number)]


def objects(prompt: Prompt, settings: Settings = SETTINGS, number: int = 1) -> list[dict[str, Any]]:
    one = {**settings_for_record(settings), "prompt": prompt.record, "trajectories": []}
    return [{**one, "process_rank": rank} for rank in range(number)]


def opened(folder: Path, settings: Settings = SETTINGS, num_processes: int = 1) -> RunFolder:
    run = RunFolder(folder, settings, num_processes)
    run.open()
    return run


def test_names_are_the_contracts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, SETTINGS, 1)
    assert run.path(7).name == "Tiny-1_RM-2_prompt_0007.json"
    assert run.path(123456).name == "Tiny-1_RM-2_prompt_123456.json"


def test_what_is_written_is_finished_and_reads_back(tmp_path: Path) -> None:
    some = prompts(3)
    with opened(tmp_path / "a" / "b") as run:
        path = run.write(some[1], objects(some[1]))
        assert json.loads(path.read_text()) == objects(some[1])
        assert run.finished(some) == {1}
    with opened(tmp_path / "a" / "b") as run:
        assert run.finished(some) == {1}


def test_pretty_print_changes_the_file_and_not_the_resume(tmp_path: Path) -> None:
    some = prompts(1)
    with opened(tmp_path) as run:
        flat = run.write(some[0], objects(some[0])).read_text()
    with opened(tmp_path, replace(SETTINGS, pretty_print_output=True)) as run:
        assert run.finished(some) == {0}
        indented = run.write(some[0], objects(some[0])).read_text()
    assert "\n" not in flat and indented.count("\n") > 10
    assert json.loads(flat) == json.loads(indented)


@pytest.mark.parametrize("keep", [0, 1, 50, -1])
@pytest.mark.parametrize("with_notes", [True, False])
def test_a_file_cut_short_is_done_again(
    tmp_path: Path, keep: int, with_notes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    some = prompts(2)
    with opened(tmp_path) as run:
        paths = [run.write(prompt, objects(prompt)) for prompt in some]
    paths[0].write_bytes(paths[0].read_bytes()[:keep])
    if not with_notes:
        (tmp_path / ".finished.0.jsonl").unlink()
    with opened(tmp_path) as run:
        assert run.finished(some) == {1}
    assert "its prompt is done again" in caplog.text and paths[0].name in caplog.text


@pytest.mark.parametrize(
    "content", ["null", "{}", "[]", "[1]", "[{}]", '[{"prompt": {}}]', "[" * 9999]
)
def test_json_that_is_no_record_is_done_again(tmp_path: Path, content: str) -> None:
    some = prompts(1)
    with opened(tmp_path) as run:
        run.path(0).write_text(content)
        assert run.finished(some) == set()


def test_a_file_with_another_index_inside_is_done_again(tmp_path: Path) -> None:
    some = prompts(2)
    with opened(tmp_path) as run:
        os.rename(run.write(some[0], objects(some[0])), run.path(1))
        assert run.finished(some) == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 0.9),
        ("seed", 1),
        ("batch_size", 3),
        ("temperature", 0.5),
        ("speculative_rejection", True),
        ("max_tokens", 100),
        ("dtype", "float32"),
        ("kv_cache_gb", 2.0),
        ("parallel", "prompts"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    some = prompts(2)
    with opened(tmp_path) as run:
        run.write(some[0], objects(some[0]))
    other = replace(SETTINGS, **{name: value})
    with opened(tmp_path, other) as run, pytest.raises(FolderRefused) as error:
        run.finished(some)
    assert f"{name} is {getattr(SETTINGS, name)!r} there, {value!r} now" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_another_model_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    some = prompts(1)
    with opened(tmp_path) as run:
        run.write(some[0], objects(some[0]))
    with (
        opened(tmp_path, replace(SETTINGS, llm_name="Other")) as run,
        pytest.raises(FolderRefused, match="llm_name is 'owner/Tiny-1' there, 'Other' now"),
    ):
        run.finished(some)


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    some = prompts(1)
    with opened(tmp_path, num_processes=2) as run:
        run.write(some[0], objects(some[0], number=2))
    with opened(tmp_path) as run, pytest.raises(FolderRefused, match="num_processes is 2 there"):
        run.finished(some)
    spread = replace(SETTINGS, parallel="prompts")
    with opened(tmp_path / "b", spread, 8) as run:
        run.write(some[0], objects(some[0], spread))
    with opened(tmp_path / "b", spread, 4) as run:  # who took a prompt does not matter there
        assert run.finished(some) == {0}


@pytest.mark.parametrize(
    "change",
    [
        {"output_folder": "x"},
        {"pretty_print_output": True},
        {"record_memory": True},
        {"local_files_only": True},
        {"data_filename": "copy.json"},
        {"model_dir": "elsewhere"},
        {"num_prompts": 1},
    ],
)
def test_settings_that_do_not_matter_resume(tmp_path: Path, change: dict[str, Any]) -> None:
    some = prompts(2)
    with opened(tmp_path) as run:
        run.write(some[0], objects(some[0]))
    with opened(tmp_path, replace(SETTINGS, **change)) as run:
        assert run.finished(some) == {0}


def test_another_prompt_with_the_same_index_is_refused(tmp_path: Path) -> None:
    some = prompts(1)
    with opened(tmp_path) as run:
        run.write(some[0], objects(some[0]))
    other = [Prompt(0, "another", {"JSON_idx": 0, "prompt": "another"})]
    with opened(tmp_path) as run, pytest.raises(FolderRefused, match="--data_filename"):
        run.finished(other)


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    names = ["notes.txt", "x_prompt_0001.json", "Tiny-1_RM-2_prompt_1.json", ".hidden.5.tmpx"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "Tiny-1_RM-2_prompt_0001.json").mkdir()
    with opened(tmp_path) as run:
        assert run.finished(prompts(2)) == set()
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_what_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".Tiny-1_RM-2_prompt_0001.json.4711.tmp"
    left.write_text("[{")
    opened(tmp_path).close()
    assert not left.exists()


def test_notes_that_lie_are_not_believed(tmp_path: Path) -> None:
    some = prompts(3)
    with opened(tmp_path) as run:
        for prompt in some:
            run.write(prompt, objects(prompt))
    notes = tmp_path / ".finished.0.jsonl"
    lines = notes.read_text().splitlines()
    run.path(2).unlink()  # a note without its file
    notes.write_text('{"file": 3}\nnonsense\n[1]\n' + "\n".join(lines)[:-20])
    with opened(tmp_path) as run:
        assert run.finished(some) == {0, 1}
    assert len(notes.read_text().splitlines()) == 2


def test_strict_json_and_the_place_of_what_is_not(tmp_path: Path) -> None:
    some = prompts(1)
    wrong = objects(some[0])
    wrong[0]["rounds"] = [{"scores": [0.5, float("nan")]}]
    with opened(tmp_path) as run:
        with pytest.raises(NotJson, match=r"record\[0\].rounds\[0\].scores\[1\] is nan"):
            run.write(some[0], wrong)
        assert not run.path(0).exists()
    with pytest.raises(NotJson, match="Path"):
        dumps_strict([{"a": Path("x")}], None)


def test_odd_texts_survive(tmp_path: Path) -> None:
    text = "\ud83d lone, \U0001f600, \u2028, \x00, \u202eright-to-left, <|im_end|>"
    prompt = Prompt(0, text, {"JSON_idx": 0, "prompt": text})
    with opened(tmp_path) as run:
        path = run.write(prompt, objects(prompt))
        assert json.loads(path.read_text())[0]["prompt"]["prompt"] == text
        assert run.finished([prompt]) == {0}
    with opened(tmp_path) as run:
        assert run.finished([prompt]) == {0}


# ---- who may write -------------------------------------------------------------------------------


def test_a_second_run_on_the_folder_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(FolderRefused, match=f"another run .*{os.getpid()}"):
        opened(tmp_path)
    opened(tmp_path).close()


def test_a_dead_run_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from suite.files import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[2])); print('locked', flush=True); time.sleep(60)"
    )
    line = [sys.executable, "-c", program, str(PROJECT), str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(InUse, match=f"process {other.pid} on"):
            FolderLock(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    FolderLock(tmp_path).release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        lock.release()
        time.sleep(0.2)
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderRefused, match="can't be written"):
        opened(tmp_path / "file" / "out")
    with pytest.raises(FolderRefused, match="can't be written"):
        opened(Path("/proc/nope"))


# ---- a full disk ---------------------------------------------------------------------------------


def test_a_full_disk_leaves_earlier_files_whole(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the system itself refuse the write, half-way through the file."""
    some = prompts(2)
    large = objects(some[1])
    large[0]["text"] = "x" * 300_000
    with opened(tmp_path) as run:
        first = run.write(some[0], objects(some[0])).read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(
                NotWritten, match=r"prompt_0001.json could not be written: .* whole"
            ):
                run.write(some[1], large)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, ignored)
        assert run.path(0).read_bytes() == first
        assert not run.path(1).exists()
        assert not list(tmp_path.glob(".*.tmp"))
        run.write(some[1], large)  # there is room again
        assert run.finished(some) == {0, 1}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_error_at_each_step_of_writing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"suite.files.os.{step}", fails)
    with pytest.raises(NotWritten, match="No space left on device"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = prompts(2)
    monkeypatch.chdir(tmp_path)
    with opened(Path("out")) as run:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        run.write(some[0], objects(some[0]))
        run.record_failure(some[1], "a reason")
        assert run.finished(some) == {0}
    assert (tmp_path / "out" / "failures.jsonl").exists() and run.path(0).exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


# ---- failures ------------------------------------------------------------------------------------


def test_failures_are_recorded_retried_and_cleared(tmp_path: Path) -> None:
    some = prompts(3)
    listed = tmp_path / "failures.jsonl"
    with opened(tmp_path) as run:
        run.record_failure(some[0], "first reason")
        run.record_failure(some[2], "it broke")
        run.record_failure(some[0], "second reason")
        assert [(f["JSON_idx"], f["reason"]) for f in run.failures()] == [
            (2, "it broke"),
            (0, "second reason"),
        ]
    with opened(tmp_path) as run:
        assert run.finished(some) == set()  # a failed prompt is not done
        run.write(some[0], objects(some[0]))
        assert [f["JSON_idx"] for f in run.failures()] == [2]
        run.write(some[2], objects(some[2]))
        assert not listed.exists()


def test_a_broken_list_of_failures_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "failures.jsonl").write_text('{"JSON_idx": 0, "reason": "x"}\n{"JSON\n3\n')
    with opened(tmp_path) as run:
        run.finished(prompts(1))
        assert [f["JSON_idx"] for f in run.failures()] == [0]


# ---- load and fuzz -------------------------------------------------------------------------------


def test_a_large_folder_resumes_fast(tmp_path: Path) -> None:
    """20,000 here, 100,000 in the long version: both within five seconds."""
    _resume_many(tmp_path, 20_000)


@pytest.mark.long
def test_a_hundred_thousand_prompts_resume_in_five_seconds(tmp_path: Path) -> None:
    _resume_many(tmp_path, 100_000)


def _resume_many(folder: Path, number: int) -> None:
    some = prompts(number)
    with opened(folder) as run:
        for prompt in some:
            made = objects(prompt)
            made[0]["trajectories"] = [{"output": "x" * 200, "score": 0.5}] * 8
            run.path(prompt.json_idx).write_text(json.dumps(made))
        assert len(run.finished(some)) == number  # parses every file and notes it
    run.path(7).write_bytes(run.path(7).read_bytes()[:-1])
    start = time.monotonic()
    with opened(folder) as run:
        assert run.finished(some) == set(range(number)) - {7}
    assert time.monotonic() - start < 5


@hypothesis_settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["write", "cut", "drop", "touch", "fail"]))
    )
)
def test_resume_agrees_with_a_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]]
) -> None:
    """After any history, done is exactly what was written last and not damaged since."""
    folder = tmp_path_factory.mktemp("run")
    some = prompts(6)
    whole: set[int] = set()
    failed: set[int] = set()
    run = opened(folder)
    run.finished(some)
    for index, step in steps:
        path = run.path(index)
        if step == "write":
            run.write(some[index], objects(some[index]))
            whole.add(index)
            failed.discard(index)
        elif step == "fail":
            run.record_failure(some[index], "because")
            failed.add(index)
        elif path.exists() and step == "cut":
            path.write_bytes(path.read_bytes()[:-1])
            whole.discard(index)
        elif path.exists() and step == "drop":
            path.unlink()
            whole.discard(index)
        elif path.exists() and step == "touch":
            os.utime(path)
    run.close()
    with opened(folder) as again:
        assert again.finished(some) == whole
        assert {f["JSON_idx"] for f in again.failures()} == failed
