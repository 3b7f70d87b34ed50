"""Memory that is lost on the way: split work, the same answers; or the prompt fails alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from engine import workspace
from engine.kv_cache import PagedKV
from engine.memory import Chunk, is_out_of_memory
from engine.ops import TorchOps
from generator import Generator
from tests.harness import load, new_cache
from tests.launch import records
from tests.method_runs import run_search, scores, texts
from tests.test_engine_decoder import SmallMemory
from tests.test_refill import check_pages

CPU_ERROR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"


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
    small_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Out of memory at the smallest chunk: the others are computed as ever, a rerun tries it."""
    expected = tmp_path / "expected"
    assert small_cli("--output_folder", str(expected))[0] == 0
    ops, failing, inner = NoMemory(), {"first": 0, "middle": 1}[place], Generator.run

    def run(self: Generator, prompt: Any, progress: Any) -> Any:
        ops.lost = prompt.json_idx == failing
        return inner(self, prompt, progress)

    monkeypatch.setattr("suite.assembly.make_ops", lambda device, dtype: ops)
    monkeypatch.setattr(Generator, "run", run)
    code, errors = small_cli()
    assert code == 1 and "1 prompts failed" in errors
    (failure,) = failures(tmp_path)
    assert failure["JSON_idx"] == failing and "out of memory" in failure["reason"]
    assert "--kv_cache_gb" in failure["reason"]
    monkeypatch.undo()
    assert small_cli()[0] == 0
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
    small_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
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
    code, errors = small_cli(*flags)
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


def test_caches_that_no_memory_can_hold_are_a_mistake_of_the_command(
    small_cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device's size does not tell before (memory that a container may not use)."""
    monkeypatch.setattr("engine.memory.total_bytes", lambda device: 1 << 60)
    flags = ["--kv_cache_gb", "1000000", "--batch_size", "100000", "--max_gen_tokens", "400"]
    code, errors = small_cli(*flags)
    assert code == 2 and "Traceback" not in errors
    assert "out of memory while loading" in errors and "lower --kv_cache_gb (now 1000000)" in errors


def failures(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]
