"""Faults on the way, injected one by one: the prompt is named, the rest is computed, a rerun works.

What tests/test_main_cli.py, test_methods_faults.py and test_processes.py inject is not repeated.
"""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import main
from engine import workspace
from engine.kv_cache import PagedKV
from engine.memory import Chunk, is_out_of_memory
from engine.ops import TorchOps
from generator import Generator
from rewards.function_reward import FunctionReward
from suite.files import NotWritten
from suite.memory_history import recorded
from suite.model_files import check_folder
from suite.models import ModelSource
from suite.processes import Processes
from suite.progress import Progress
from suite.prompts import load_prompts
from suite.records import FolderRefused
from suite.settings import PROJECT
from suite.stopping import Stopped
from tests.harness import load, new_cache
from tests.launch import environment, records
from tests.method_runs import run_search, scores, texts
from tests.test_engine_decoder import SmallMemory
from tests.test_engine_gguf import write_gguf
from tests.test_records import objects, opened, prompts
from tests.test_refill import check_pages
from tests.tiny import make_tiny_llama

CPU_ERROR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"


@pytest.fixture
def cli(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable:
    """`main.main` in this process on two short prompts; exit code and stderr."""
    data = tmp_path / "p.json"
    data.write_text(json.dumps([{"prompt": "first"}, {"prompt": "second"}, {"prompt": "third"}]))
    models = ["--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward"]
    given = [*models, "--model_dir", str(tiny_models), "--output_folder", str(tmp_path / "out")]
    given += ["--data_filename", str(data), "--max_gen_tokens", "8", "--batch_size", "2"]

    def call(*flags: str) -> tuple[int, str]:
        code = main.main([*given, *flags])
        return code, capsys.readouterr().err

    return call


def failures(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]


# ---- memory --------------------------------------------------------------------------------------


def test_torch_on_a_cpu_says_lost_memory_in_its_own_way() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.mark.parametrize("error", [RuntimeError(CPU_ERROR), MemoryError()])
def test_a_cpus_lost_memory_splits_as_a_gpus_does(error: Exception) -> None:
    chunk, tried = Chunk("rows", 64), []

    def work() -> None:
        tried.append(chunk.size)
        if chunk.size > 16:
            raise error

    chunk.retrying(work)
    assert tried == [64, 32, 16] and chunk.num_splits == 2


def test_other_errors_are_not_tried_again() -> None:
    chunk, tried = Chunk("rows", 64), []

    def work() -> None:
        tried.append(chunk.size)
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        chunk.retrying(work)
    assert tried == [64]


class NoMemory(TorchOps):
    """While `lost`, there is none for anything."""

    lost = True

    def decode_attention(self, *given: Any) -> torch.Tensor:
        return self._unless_lost(super().decode_attention(*given))

    def packed_attention(self, *given: Any) -> torch.Tensor:
        return self._unless_lost(super().packed_attention(*given))

    def _unless_lost(self, out: torch.Tensor) -> torch.Tensor:
        if self.lost:
            raise RuntimeError(CPU_ERROR)
        return out


@pytest.mark.parametrize("place", ["first", "middle"])
def test_a_prompt_that_memory_can_not_hold_fails_alone(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Out of memory at the smallest chunk: the others are computed as ever, a rerun tries it."""
    expected = tmp_path / "expected"
    assert cli("--output_folder", str(expected))[0] == 0
    ops, failing, inner = NoMemory(), {"first": 0, "middle": 1}[place], Generator.run

    def run(self: Generator, prompt: Any, progress: Any) -> Any:
        ops.lost = prompt.json_idx == failing
        return inner(self, prompt, progress)

    monkeypatch.setattr("suite.assembly.make_ops", lambda device, dtype: ops)
    monkeypatch.setattr(Generator, "run", run)
    code, errors = cli()
    assert code == 1 and "1 prompts failed" in errors
    (failure,) = failures(tmp_path)
    assert failure["JSON_idx"] == failing and "out of memory" in failure["reason"]
    assert "--kv_cache_gb" in failure["reason"]
    monkeypatch.undo()
    assert cli()[0] == 0
    assert records(tmp_path / "out") == records(expected)


@pytest.mark.parametrize("what", ["prompt tokens", "first tokens", "rows", "reward model"])
@pytest.mark.parametrize("changes", [{"batch_size": 24}, {"init_batch_size": 24, "kv_pages": 48}])
def test_lost_memory_at_each_place_changes_nothing(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch, what: str, changes: dict[str, Any]
) -> None:
    """Memory ends when the work is done but for its last byte; the same N, texts and scores."""
    expected = run_search(tiny_models, **changes)
    retrying, lost = Chunk.retrying, []
    most = {"prompt tokens": 8, "first tokens": 8, "rows": 8, "reward model": 300}[what]

    def lossy(chunk: Chunk, work: Callable[[], None], wanted: int | None = None) -> None:
        first = getattr(work, "__name__", "") == "_sample_first"
        here = "first tokens" if first else chunk.what

        def work_and_lose() -> None:
            work()
            if here.endswith(what) and min(chunk.size, wanted or chunk.size) > most:
                lost.append(here)
                raise RuntimeError(CPU_ERROR)

        retrying(chunk, work_and_lose, wanted)

    monkeypatch.setattr(Chunk, "retrying", lossy)
    made = run_search(tiny_models, **changes)
    assert lost and made["out_of_memory_splits"] == len(lost)
    for name in ("trajectories", "rejected"):
        assert [r["candidate"] for r in made[name]] == [r["candidate"] for r in expected[name]]
    assert texts(made) == texts(expected)
    assert scores(made) == pytest.approx(scores(expected), abs=1e-4)


class FullPool:
    """Keys of all layers, or of one, that copy so many pages at once at the most."""

    def __init__(self, pool: torch.Tensor, most: int) -> None:
        self.pool, self.most, self.device = pool, most, pool.device

    def __iter__(self) -> Iterator[FullPool]:
        return iter([FullPool(layer, self.most) for layer in self.pool])

    def __getitem__(self, pages: torch.Tensor) -> torch.Tensor:
        if len(pages) > self.most:
            raise RuntimeError(CPU_ERROR)
        return self.pool[pages]

    def __setitem__(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        self.pool[pages] = content


REFILL = {"init_batch_size": 24, "refill": True, "schedule": "halving", "min_tokens": 8}


def test_lost_memory_in_a_fork_copies_fewer_pages_at_once(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same candidates, texts and scores; each split is counted."""
    expected, copies = run_search(tiny_models, **REFILL), PagedKV._copies
    assert any(r.get("forks") for r in expected["rounds"])
    lost = []

    def few_at_once(cache: PagedKV, sources: np.ndarray) -> np.ndarray:
        before, keys = cache.copying.num_splits, cache.k
        cache.k = FullPool(keys, 2)  # type: ignore[assignment]
        try:
            return copies(cache, sources)
        finally:
            cache.k = keys
            lost.append(cache.copying.num_splits - before)

    monkeypatch.setattr(PagedKV, "_copies", few_at_once)
    made = run_search(tiny_models, **REFILL)
    assert made["out_of_memory_splits"] == sum(lost) > 0
    assert texts(made) == texts(expected)
    assert scores(made) == pytest.approx(scores(expected), abs=1e-4)
    assert [r["candidate"] for r in made["rejected"]] == [
        r["candidate"] for r in expected["rejected"]
    ]


@pytest.mark.parametrize("place", ["_upload", "_copies", "_fork", "_release"])
def test_lost_memory_in_a_rejection_fails_that_prompt_alone(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Nothing there can be split further; the prompt is named, the next finds a clean cache."""
    inner, caches, expected = getattr(PagedKV, place), set(), {}
    chosen, inside = PagedKV.select, []

    def select(cache: PagedKV, rows: Any) -> None:
        caches.add(cache)
        inside.append(len(rows) > 0)
        try:
            chosen(cache, rows)
        finally:
            inside.pop()

    def lossy(cache: PagedKV, *given: Any) -> Any:
        made = inner(cache, *given)
        if loses and any(inside):
            raise RuntimeError(CPU_ERROR)
        return made

    def run(generator: Generator, prompt: Any, progress: Any) -> Any:
        nonlocal loses
        loses = prompt.json_idx % 2 == 1
        found = whole(generator, prompt, progress)
        expected.setdefault("texts", texts(found))
        assert texts(found) == expected["texts"]
        return found

    loses, whole = False, Generator.run
    monkeypatch.setattr(PagedKV, "select", select)
    monkeypatch.setattr(PagedKV, place, lossy)
    monkeypatch.setattr(Generator, "run", run)
    monkeypatch.setattr("generator.stream_key", lambda *given: 5)  # all prompts are one prompt
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": "one"}] * 7))
    flags = ["--speculative_rejection", "--init_batch_size", "24", "--refill", "--schedule"]
    flags += ["halving", "--min_tokens", "8", "--max_gen_tokens", "96", "--save_token_ids"]
    code, errors = cli(*flags)
    assert code == 1 and "3 prompts failed" in errors, errors
    assert [f["JSON_idx"] for f in failures(tmp_path)] == [1, 3, 5]
    assert all("out of memory" in f["reason"] for f in failures(tmp_path))
    assert len(records(tmp_path / "out")) == 4
    assert len(caches) == 2  # the generator's and the reward model's
    for cache in caches:
        cache.clear()
        check_pages(cache)
        assert cache.num_free_pages == cache.num_pages


def test_lost_memory_while_rows_grow_loses_no_page(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache(load(tiny_models / "tiny-llama").config)
    cache.add_rows(3)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "from_numpy", Mock(side_effect=MemoryError()))
        cache.grow(20)
    assert cache.num_free_pages == cache.num_pages and not cache.lengths.any()
    cache.grow(20)
    check_pages(cache)


@pytest.mark.parametrize(("rows", "tokens"), [(16, 300), (8, 256)])
def test_a_workspace_that_does_not_fit_is_measured_smaller(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int
) -> None:
    """The warm-up passes that plan the memory of a GPU; the run itself has the same N."""
    changes: dict[str, Any] = {"batch_size": 24}
    expected, ops = run_search(tiny_models, **changes), SmallMemory(rows, tokens)
    measured: list[workspace.Workspace] = []

    def measure(model: Any, judge: Any, ops: Any, sampler: Any, *given: Any) -> Any:
        sizes = {"rows": 32, "tokens": 2048, "page_size": 16}
        measured.append(workspace.measure_workspace(model, model, ops, sampler, **sizes))
        return workspace.Workspace()

    def peak(device: torch.device, work: Callable[[], Any]) -> workspace.Measured:
        work()
        return 1, 0.5

    monkeypatch.setattr(workspace, "_measure", peak)
    monkeypatch.setattr("suite.run_plan._workspace", measure)
    monkeypatch.setattr("suite.assembly.make_ops", lambda device, dtype: ops)
    made = run_search(tiny_models, **changes)
    assert measured == [workspace.Workspace(1, 1, 0.5)]
    assert texts(made) == texts(expected)


def test_caches_that_no_memory_can_hold_are_a_mistake_of_the_command(cli: Any) -> None:
    flags = ["--kv_cache_gb", "1000000", "--batch_size", "100000", "--max_gen_tokens", "400"]
    code, errors = cli(*flags)
    assert code == 2 and "Traceback" not in errors
    assert "out of memory while loading" in errors and "lower --kv_cache_gb" in errors


# ---- rewards -------------------------------------------------------------------------------------


def leaves(prompt: str, answers: list[str]) -> list[float]:
    raise SystemExit(0)


class Unnumbered:
    def __float__(self) -> float:
        raise SystemExit(3)


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (leaves, "raised SystemExit: 0"),
        (lambda p, a: [Unnumbered()] * len(a), "raised SystemExit: 3"),
        (lambda p, a: None, "NoneType"),
        (lambda p, a: [1j] * len(a), "complex"),
        (lambda p, a: [10**400] * len(a), "too large"),
        (lambda p, a: np.ones((len(a), 2)), "must return a list of numbers"),
    ],
)
def test_a_function_ends_no_run(function: Any, reason: str, timeout: float | None) -> None:
    """sys.exit(0) in a reward function would end a run as if all were done."""
    from engine.candidates import Candidate
    from rewards.base import RewardFailed

    reward = FunctionReward("m:f", function, lambda ids: ["a"] * len(ids), timeout)
    reward.begin("p")
    with pytest.raises(RewardFailed, match=reason):
        reward.score([Candidate(0, np.zeros(1, np.int64)), Candidate(1, np.zeros(1, np.int64))])


WANDERS = """
import os, pathlib, time

home = pathlib.Path(__file__).parent
(home / "far" / "off").mkdir(parents=True, exist_ok=True)
if WHEN == "import":
    os.chdir(home / "far")

def score(prompt, answers):
    if WHEN == "import":
        assert os.getcwd() == str(home / "far")  # its own folder stays as it was left
    if WHEN == "late":
        time.sleep(0.3)  # three prompts later
    os.chdir(home / "far" / "off")
    if WHEN == "late":
        os.chdir(home)
    if WHEN == "import":
        os.chdir(home / "far")
    return [float(len(answer)) for answer in answers]
"""


@pytest.mark.parametrize("when", ["import", "call", "call in time", "late"])
def test_a_function_that_changes_the_working_folder(
    tiny_models: Path, tmp_path: Path, when: str
) -> None:
    """Every path of the command is relative to where it was typed; so are the files it makes."""
    typed, home = tmp_path / "typed", tmp_path / "home"
    for folder in (typed, home):
        folder.mkdir()
    (home / "wanders.py").write_text(WANDERS.replace("WHEN", repr(when)))
    (typed / "p.json").write_text(json.dumps([{"prompt": f"prompt {i}"} for i in range(8)]))
    (typed / "models").symlink_to(tiny_models)
    line = [sys.executable, str(PROJECT / "main.py"), "--reward_model_name", "wanders:score"]
    line += ["--model_dir", "models", "--llm_name", "tiny-llama", "--data_filename", "p.json"]
    line += ["--output_folder", "out", "--max_gen_tokens", "4", "--batch_size", "2"]
    if when in ("call in time", "late"):
        line += ["--reward_timeout", "0.1" if when == "late" else "60"]
    done = subprocess.run(
        line,
        cwd=typed,
        env=environment() | {"PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == (1 if when == "late" else 0), done.stderr
    if when == "late":
        assert len((typed / "out" / "failures.jsonl").read_text().splitlines()) == 8
    else:
        assert len(records(typed / "out")) == 8
    made = {path.name for path in home.rglob("*") if path.suffix != ".pyc"}
    assert made <= {"wanders.py", "far", "off", "__pycache__"}


# ---- files ---------------------------------------------------------------------------------------


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
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
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
        code, errors = cli()
    assert code == 1 and "Traceback" not in errors
    assert f"{out}/tiny-llama_tiny-reward_prompt_0001.json could not be written: " in errors
    assert os.strerror(number) in errors and "Files written before are whole" in errors
    assert list(records(out)) == ["tiny-llama_tiny-reward_prompt_0000.json"]
    before = {path.name: path.read_bytes() for path in out.glob("*.json")}
    assert not list(out.glob(".*.tmp"))
    assert cli()[0] == 0
    assert len(records(out)) == 3
    assert before.items() <= {path.name: path.read_bytes() for path in out.glob("*.json")}.items()


def test_a_folder_deleted_in_the_middle(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Generator.run

    def run(self: Any, prompt: Any, progress: Any) -> Any:
        if prompt.json_idx == 1:
            shutil.rmtree(tmp_path / "out")
        return inner(self, prompt, progress)

    monkeypatch.setattr(Generator, "run", run)
    code, errors = cli()
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


def test_a_lost_log_ends_no_run(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress(2, stream=FullLog()) as progress:
        progress.say("anything")
        progress.update(rows=1)
        progress.fail(0, "a reason")
    monkeypatch.setattr("sys.stderr", FullLog())
    assert cli()[0] == 0
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


# ---- fuzz of what a run reads --------------------------------------------------------------------

ODD = (None, True, -1, 10**30, 1.5, float("nan"), "", "\ud800", "../../x", "\0", [], {}, [[]])


def spoiled(value: Any, rng: random.Random) -> bytes:
    """JSON of `value` with a few places changed, and now and then with bytes changed or cut off."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places, inner = [], value
        while isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            places.append((inner, key))
            inner = inner[key]
        if places and rng.random() < 0.25:
            del places[-1][0][places[-1][1]]
        elif places:
            places[-1][0][places[-1][1]] = copy.deepcopy(rng.choice(ODD))
    data = bytearray(json.dumps(value).encode())
    if rng.random() < 0.15:
        del data[rng.randrange(len(data)) :]
    elif rng.random() < 0.15:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def test_spoiled_prompt_files_are_read_or_named(tmp_path: Path) -> None:
    rng, outcomes = random.Random(9), [0, 0]
    entries = [{"JSON_idx": i, "prompt": f"p{i}", "more": {"x": [1]}} for i in range(4)]
    for _ in range(1500):
        (tmp_path / "p.json").write_bytes(spoiled(entries, rng))
        try:
            read = load_prompts(str(tmp_path / "p.json"))
        except ValueError as error:
            assert "p.json" in str(error)
            outcomes[0] += 1
        else:
            assert len({p.json_idx for p in read}) == len(read)
            assert all(type(p.json_idx) is int and 0 <= p.json_idx <= 10**12 for p in read)
            outcomes[1] += 1
    assert min(outcomes) > 100


def test_spoiled_folders_resume_or_are_refused(tmp_path: Path) -> None:
    """Records, notes and failures at once: what counts as done is whole and of these settings."""
    rng, some, outcomes = random.Random(9), prompts(3), [0, 0]
    note = {"file": "", "size": 3, "mtime_ns": 4, "prompt": "a", "run": "b"}
    failure = {"JSON_idx": 1, "prompt": "a", "reason": "b"}
    for _ in range(300):
        with opened(tmp_path) as run:
            for prompt in some:
                content = objects(prompt)
                whole = json.dumps(content).encode()
                spoils = rng.random() < 0.5
                run.path(prompt.json_idx).write_bytes(spoiled(content, rng) if spoils else whole)
            (tmp_path / ".finished.0.jsonl").write_bytes(spoiled(note, rng) + b"\n")
            (tmp_path / "failures.jsonl").write_bytes(spoiled(failure, rng) + b"\n")
            run.failures()
            try:
                done = run.finished(some)
            except FolderRefused:
                outcomes[0] += 1
                continue
            outcomes[1] += 1
            for index in done:
                (made,) = json.loads(run.path(index).read_bytes())
                assert made["prompt"]["JSON_idx"] == index and made["batch_size"] == 2
                assert made["prompt"]["prompt"] == f"p{index}"
    assert min(outcomes) > 30
