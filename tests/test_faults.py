"""Faults on the way, injected one by one: the prompt is named, the rest is computed, a rerun works.

Files, disks and logs here; memory, rewards and spoiled files in test_faults_*.py. What
tests/test_main_cli.py, test_methods_faults.py and test_processes_ends.py inject is not repeated.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from generator import Generator
from suite.files import NotWritten
from suite.memory_history import recorded
from suite.model_files import check_folder
from suite.models import ModelSource
from suite.processes import Processes
from suite.progress import Progress
from suite.settings import PROJECT
from suite.stopping import Stopped
from tests.launch import environment, records
from tests.test_engine_gguf import write_gguf
from tests.test_records import objects, opened, prompts
from tests.tiny import make_tiny_llama


@pytest.mark.parametrize("blocked", [".failures.lock", "failures.jsonl"])
def test_failures_that_can_not_be_recorded_are_said(tmp_path: Path, blocked: str) -> None:
    """As a full disk or a folder that is gone: one clear error, never a traceback."""
    with opened(tmp_path) as run:
        (tmp_path / blocked).mkdir()
        with pytest.raises(NotWritten, match=r"failures\.jsonl could not be written"):
            run.record_failure(prompts(1)[0], "a reason")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "replace", "fsync"])
def test_a_folder_that_becomes_read_only(
    small_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """At the call of the system itself: permissions bind no root. A rerun finishes the folder."""
    inner, out = getattr(os, call), tmp_path / "out"

    def refused(*given: Any, **more: Any) -> Any:
        handle = call == "fsync" and os.readlink(f"/proc/self/fd/{given[0]}")
        if "prompt_0001" in str(handle or given[0]):
            raise OSError(number, os.strerror(number))
        return inner(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refused)
        code, errors = small_cli()
    assert code == 1 and "Traceback" not in errors
    assert f"{out}/tiny-llama_tiny-reward_prompt_0001.json could not be written: " in errors
    assert os.strerror(number) in errors and "Files written before are whole" in errors
    assert list(records(out)) == ["tiny-llama_tiny-reward_prompt_0000.json"]
    before = {path.name: path.read_bytes() for path in out.glob("*.json")}
    assert not list(out.glob(".*.tmp"))
    assert small_cli()[0] == 0
    assert len(records(out)) == 3
    assert before.items() <= {path.name: path.read_bytes() for path in out.glob("*.json")}.items()


def test_a_folder_deleted_in_the_middle(
    small_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Generator.run

    def run(self: Any, prompt: Any, progress: Any) -> Any:
        if prompt.json_idx == 1:
            shutil.rmtree(tmp_path / "out")
        return inner(self, prompt, progress)

    monkeypatch.setattr(Generator, "run", run)
    code, errors = small_cli()
    assert code == 1 and "could not be written: No such file or directory" in errors
    assert "Traceback" not in errors


def test_half_written_states_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".a_b_prompt_0003.hidden.0.safetensors.77.tmp"
    other = tmp_path / ".a_b_prompt_0003.notes.77.tmp"
    left.write_bytes(b"half")
    other.write_bytes(b"not ours")
    with opened(tmp_path):
        assert not left.exists() and other.exists()


def test_a_record_that_is_not_strict_json_is_done_again(tmp_path: Path) -> None:
    some = prompts(1)
    with opened(tmp_path) as run:
        text = run.write(some[0], objects(some[0])).read_text()
        run.path(0).write_text(text[:-2] + ', "x": NaN}]')
        assert run.finished(some) == set()


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"file": [], "size": 1, "mtime_ns": 1, "prompt": "a", "run": "b"}',
        '{"JSON_idx": {}, "prompt": [], "reason": NaN}',
    ],
)
def test_damaged_lists_of_ours_are_no_lists(tmp_path: Path, line: str) -> None:
    (tmp_path / "failures.jsonl").write_text(line + "\n")
    (tmp_path / ".finished.0.jsonl").write_text(line + "\n")
    with opened(tmp_path) as run:
        assert run.finished(prompts(1)) == set() and run.failures() == []


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a disk that fills up: writing beyond fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("full_at", ["weights", "tokenizer"])
def test_a_disk_that_fills_while_the_embedded_model_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    """The folder and the remedy are named, nothing half-made stays; with room, all is well."""
    made = make_tiny_llama(tmp_path / "hf", vocab=260)
    gguf = write_gguf(made, tmp_path / "model.gguf")
    cache = tmp_path / "cache"
    source = ModelSource("it", "embedded", "LlamaForCausalLM", cache / "it", gguf)
    if full_at == "tokenizer":
        monkeypatch.setattr("engine.gguf.save_file", lambda *given: None)
    with (
        files_of_at_most(1000),
        pytest.raises(ValueError, match=r"could not be stored.* make room .*SPECREJ_CACHE") as it,
    ):
        source.ready()
    assert str(cache) in str(it.value) and "not a GGUF file" not in str(it.value)
    assert [path.name for path in cache.iterdir()] == [".it.lock"]
    monkeypatch.undo()
    assert check_folder(source.ready(), "generator") == "LlamaForCausalLM"


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for torch's recorder on a GPU: what it was told."""
    told: list[Any] = []

    def dump(path: str) -> None:
        told.append(Path(path).name)
        Path(path).write_bytes(bytes(4000))

    monkeypatch.setattr(
        "torch.cuda.memory._record_memory_history", lambda **given: told.append(given)
    )
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", dump)
    return told


ON_A_GPU = Processes(1, 2, torch.device("cuda"))


def test_a_snapshot_of_memory_appears_whole(tmp_path: Path, history: list[Any]) -> None:
    with recorded(True, tmp_path, ON_A_GPU):
        assert len(history) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["memory_process_1.pickle"]
    assert history[-1] == {"enabled": None}
    with recorded(False, tmp_path, ON_A_GPU):
        pass
    assert len(history) == 3


@pytest.mark.parametrize("error", [None, Stopped("stopped by SIGTERM", 143), KeyError("a bug")])
def test_a_snapshot_on_a_full_disk_changes_nothing_else(
    tmp_path: Path, history: list[Any], caplog: Any, error: BaseException | None
) -> None:
    """The run ends as it would have without --record_memory; an older snapshot stays whole."""
    (tmp_path / "memory_process_1.pickle").write_bytes(b"older")
    ends = pytest.raises(type(error)) if error else nullcontext()
    with files_of_at_most(1000), ends, recorded(True, tmp_path, ON_A_GPU):
        if error:
            raise error
    assert "memory_process_1.pickle could not be written (File too large)" in caplog.text
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]
    assert history[-1] == {"enabled": None}


def test_snapshots_that_a_killed_run_left_half_written_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".memory_process_3.pickle.77.tmp"
    left.write_bytes(b"half")
    with opened(tmp_path):
        assert not left.exists()


class FullLog(io.StringIO):
    """A log file on a disk that fills up."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_lost_log_ends_no_run(
    small_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress(2, stream=FullLog()) as progress:
        progress.say("anything")
        progress.update(rows=1)
        progress.fail(0, "a reason")
    monkeypatch.setattr("sys.stderr", FullLog())
    assert small_cli()[0] == 0
    assert len(records(tmp_path / "out")) == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("lost", "reason"), [("full", "No space left on device"), ("closed", "Broken pipe")]
)
def test_a_lost_stdout_ends_the_run_before_its_first_prompt(
    tiny_models: Path, tmp_path: Path, lost: str, reason: str, unbuffered: str
) -> None:
    """One message and code 2, and nothing at the interpreter's end (code 120, "ignored")."""
    if lost == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        nobody, out = os.pipe()
        os.close(nobody)
    line = [sys.executable, "main.py", "--model_dir", str(tiny_models), "--llm_name", "tiny-llama"]
    line += ["--reward_model_name", "tiny-reward", "--output_folder", str(tmp_path / "out")]
    line += ["--num_prompts", "1", "--max_gen_tokens", "4", "--batch_size", "1"]
    env = environment() | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        line, cwd=PROJECT, env=env, stdout=out, stderr=subprocess.PIPE, text=True, timeout=180
    )
    os.close(out)
    assert done.returncode == 2
    assert f"main.py: error: the memory plan can't be written to stdout ({reason})" in done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr  # with "1 prompts, 0 done before"
    assert records(tmp_path / "out") == {}
