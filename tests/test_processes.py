"""Who is who and what is handed over: real launchers, a scripted generator (tests/scripted.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from suite import processes as processes_module
from suite.processes import Processes, WrongLaunch, _check_launch, _Watcher
from suite.stopping import Stopped, Stopping
from tests.launch import SCRIPTED, begin, launcher, records, run, wait_for

# ---- who is who --------------------------------------------------------------------------------


def test_two_processes_make_one_file_with_disjoint_seeds(flags: list[str], tmp_path: Path) -> None:
    done = run([*launcher(2), SCRIPTED, *flags, "--seed", "8"])
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "out")
    assert len(found) == 8
    for objects in found.values():
        assert [(o["process_rank"], o["process_seed"]) for o in objects] == [(0, 8), (1, 9)]
        texts = [t["output"] for o in objects for t in o["trajectories"]]
        assert len(set(texts)) == 4
    assert done.stderr.count("8 prompts, 0 done before") == 1  # the first process speaks


def test_seeds_go_by_global_rank_over_two_machines(flags: list[str], tmp_path: Path) -> None:
    """Two launchers on this machine, as two machines would: one process each."""
    port = _free_port()
    lines = []
    for machine in range(2):
        line = launcher(2)
        line[line.index("--num_machines") + 1] = "2"
        line[line.index("--machine_rank") + 1] = str(machine)
        line[line.index("--main_process_port") + 1] = str(port)
        lines.append([*line, "--main_process_ip", "127.0.0.1", SCRIPTED, *flags])
    runs = [begin(line) for line in lines]
    outputs = [p.communicate(timeout=120) for p in runs]
    assert [p.returncode for p in runs] == [0, 0], outputs
    for objects in records(tmp_path / "out").values():
        assert [o["process_seed"] for o in objects] == [0, 1]


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_launcher_that_starts_fewer_processes_is_refused(
    flags: list[str], tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu"]
    done = run([*line, SCRIPTED, *flags])
    assert "exit status 2" in done.stderr
    assert "asked for 2 processes" in done.stderr and "--multi_gpu" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_world_size_that_is_not_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(WrongLaunch, match="asked for 8 processes, but this one sees 1"):
        _check_launch(1)
    _check_launch(8)
    monkeypatch.delenv("WORLD_SIZE")
    _check_launch(1)


@pytest.mark.parametrize(("num_prompts", "num_processes"), [(17, 8), (2, 3)])
def test_prompts_spread_over_processes(
    flags: list[str], tmp_path: Path, num_prompts: int, num_processes: int
) -> None:
    some = [{"JSON_idx": 3 * i, "prompt": f"prompt {i}"} for i in range(num_prompts)]
    (tmp_path / "p.json").write_text(json.dumps(some))
    log = tmp_path / "log"
    flags += ["--parallel", "prompts", "--data_filename", str(tmp_path / "p.json")]
    done = run([*launcher(num_processes), SCRIPTED, *flags], {"log": str(log)})
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "out")
    assert len(found) == num_prompts
    for place, objects in enumerate(found.values()):
        assert len(objects) == 1
        assert objects[0]["prompt"]["JSON_idx"] == 3 * place
        assert objects[0]["process_rank"] == place % num_processes
        assert objects[0]["process_seed"] == 0
    ran = [line for line in log.read_text().splitlines() if line.startswith("run")]
    assert len(ran) == num_prompts  # each prompt once


# ---- handing over, in this process ---------------------------------------------------------------


def _together(number: int, work: Any) -> list[Any]:
    """Runs `work(Processes)` for `number` ranks in threads, over one real store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list[Any] = [None] * number

    def one(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        results[rank] = work(Processes(rank, number, torch.device("cpu"), own))

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_outcomes_arrive_in_rank_order_again_and_again() -> None:
    def work(processes: Processes) -> list[Any]:
        return [processes.gather(["ok", {"rank": processes.rank, "turn": t}]) for t in range(5)]

    results = _together(4, work)
    for turn in range(5):
        expected = [["ok", {"rank": rank, "turn": turn}] for rank in range(4)]
        assert results[0][turn] == expected
    assert results[1] == results[2] == results[3] == [None] * 5


def test_outcomes_larger_than_the_stores_limit() -> None:
    def work(processes: Processes) -> Any:
        noise = os.urandom(12_000_000).hex() if processes.rank == 1 else ""
        return (noise, processes.gather(["ok", noise]))

    results = _together(2, work)
    assert results[0][1][1] == ["ok", results[1][0]]


def test_the_store_does_not_grow() -> None:
    def work(processes: Processes) -> int:
        for turn in range(20):
            processes.gather(turn)
        return processes._store.num_keys() if processes.is_main else 0

    assert _together(2, work)[0] <= 2  # the last turn's mark and the store's own


def test_a_broadcast_reaches_everybody() -> None:
    results = _together(3, lambda p: p.broadcast([1, 2] if p.is_main else None))
    assert results == [[1, 2]] * 3


class _Recorder:
    """Takes the place of Stopping for a watcher."""

    def __init__(self) -> None:
        self.stops: list[tuple[str, int]] = []

    def stop(self, reason: str, exit_code: int) -> None:
        self.stops.append((reason, exit_code))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes watchers over one store that beat every 50 ms and lose patience after 1.5 s."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(processes_module, "BEAT_SEC", 0.05)
    monkeypatch.setattr(processes_module, "SILENCE_SEC", 1.5)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    made = []

    def make(rank: int) -> tuple[_Watcher, _Recorder]:
        recorder = _Recorder()
        watcher = _Watcher(rank, 2, recorder)
        watcher.start()
        made.append(watcher)
        return watcher, recorder

    yield make
    for watcher in made:
        watcher.leave(in_order=True)
        watcher.join(5)


def test_a_long_prompt_is_no_silence(watched: Any) -> None:
    (_, first), (_, second) = watched(0), watched(1)
    time.sleep(4)  # more than two patiences without a word but the beat
    assert first.stops == second.stops == []


def test_a_silent_process_stops_the_others(watched: Any) -> None:
    _, first = watched(0)
    other, _ = watched(1)
    wait_for(lambda: other._store.check(["beat/1"]), 5)
    other._ended.set()  # as if it were frozen
    wait_for(lambda: first.stops, 5)
    assert first.stops[0] == ("process 1 has given no sign of life for 2 s", 1)


def test_a_process_that_left_in_order_is_not_missed(watched: Any) -> None:
    _, first = watched(0)
    other, _ = watched(1)
    other.leave(in_order=True)
    time.sleep(3)
    assert first.stops == []


def test_the_first_reason_reaches_the_others(watched: Any) -> None:
    first, _ = watched(0)
    second, recorder = watched(1)
    first.abort("2 process 0: no room")
    first.abort("1 something later")
    wait_for(lambda: recorder.stops, 5)
    assert recorder.stops == [("process 0: no room", 2)]
    assert second.told() == (2, "process 0: no room")


def test_stopping_raises_once_and_gives_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped, Stopping():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stopped.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_stopping_from_a_thread_carries_reason_and_code() -> None:
    with pytest.raises(Stopped) as stopped, Stopping() as stopping:
        threading.Timer(0.1, stopping.stop, ("process 3 is gone", 1)).start()
        time.sleep(5)
    assert (stopped.value.reason, stopped.value.exit_code) == ("process 3 is gone", 1)


def test_processes_alone_need_no_store() -> None:
    alone = Processes(0, 1, torch.device("cpu"))
    assert alone.gather(("ok", 1)) == [("ok", 1)]
    assert alone.broadcast([1]) == [1]
    alone.barrier()
    alone.abort("nobody listens")
    assert alone.why_stopped() is None
    alone.close()
