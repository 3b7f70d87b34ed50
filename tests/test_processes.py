"""Processes, signals and faults: real launchers, a scripted generator (tests/scripted.py)."""

from __future__ import annotations

import json
import os
import re
import resource
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
from tests.launch import begin, kill, launcher, records, run, wait_for, workers

SCRIPTED = "tests/scripted.py"


@pytest.fixture
def flags(tiny_models: Path, tmp_path: Path) -> list[str]:
    """Flags of a small run into `tmp_path/out`."""
    models = ["--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward"]
    where = ["--model_dir", str(tiny_models), "--output_folder", str(tmp_path / "out")]
    return [*models, *where, "--batch_size", "2"]


def direct(*flags: str) -> list[str]:
    return [sys.executable, SCRIPTED, *flags]


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


# ---- a fault ends all, and leaves a folder to resume ---------------------------------------------


def test_an_exception_on_one_process_ends_all(flags: list[str], tmp_path: Path) -> None:
    script = {"raise": [[1, 1]], "seconds_of": {"0": 4}}  # the first process is busy meanwhile
    start = time.monotonic()
    done = run([*launcher(2), SCRIPTED, *flags], script)
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    assert "process 1, prompt 1: KeyError: 'scripted exception'" in done.stderr
    names = sorted(p.name for p in (tmp_path / "out").glob("*.json"))
    assert names == ["tiny-llama_tiny-reward_prompt_0000.json"]
    failure = json.loads((tmp_path / "out" / "failures.jsonl").read_text())
    assert failure["JSON_idx"] == 1 and "KeyError" in failure["reason"]

    again = run([*launcher(2), SCRIPTED, *flags])
    assert again.returncode == 0, again.stderr
    assert len(records(tmp_path / "out")) == 8
    assert not (tmp_path / "out" / "failures.jsonl").exists()


def test_a_killed_process_ends_the_other(flags: list[str], tmp_path: Path) -> None:
    start = time.monotonic()
    done = run([*launcher(2), SCRIPTED, *flags], {"kill": [[2, 1]], "seconds_of": {"0": 1}})
    assert done.returncode != 0 and time.monotonic() - start < 60
    assert len(records(tmp_path / "out")) == 2
    assert workers(tmp_path / "out") == []


@pytest.mark.long
def test_a_frozen_process_ends_the_other_within_a_minute(flags: list[str], tmp_path: Path) -> None:
    line = [*launcher(2), SCRIPTED, *flags]
    with begin(line, {"freeze": [[1, 1]]}) as frozen:
        wait_for(lambda: len(records(tmp_path / "out")) == 1)
        start = time.monotonic()
        wait_for(lambda: len(workers(tmp_path / "out")) == 1, 60, "the other's end")
        assert time.monotonic() - start < 45
        _, errors = frozen.communicate(timeout=60)
    assert frozen.returncode != 0
    assert "process 1 has given no sign of life" in errors


def test_a_mistake_found_while_building_is_code_2(flags: list[str], tmp_path: Path) -> None:
    done = run(direct(*flags), {"build_fails_on": 0})
    assert done.returncode == 2
    assert done.stderr.count("--kv_cache_gb 0.001 is too small") == 1
    assert "Traceback" not in done.stderr
    both = run([*launcher(2), SCRIPTED, *flags], {"build_fails_on": 1})
    assert both.returncode != 0
    assert "--kv_cache_gb 0.001 is too small" in both.stderr
    assert not list((tmp_path / "out").glob("*.json*"))  # and no prompt is blamed for it


def test_failed_prompts_are_recorded_and_the_rest_is_done(flags: list[str], tmp_path: Path) -> None:
    done = run(direct(*flags), {"fail": [[2, 0]], "nan_at": 5})
    assert done.returncode == 1
    assert "2 prompts failed" in done.stderr
    assert len(records(tmp_path / "out")) == 6
    lines = (tmp_path / "out" / "failures.jsonl").read_text().splitlines()
    reasons = {f["JSON_idx"]: f["reason"] for f in map(json.loads, lines)}
    assert reasons[2] == "process 0: scripted failure"
    assert "score is nan" in reasons[5]

    log = tmp_path / "log"
    again = run(direct(*flags), {"log": str(log)})
    assert again.returncode == 0, again.stderr
    assert log.read_text().splitlines() == ["build rank 0", "run 2 rank 0", "run 5 rank 0"]
    assert not (tmp_path / "out" / "failures.jsonl").exists()

    third = run(direct(*flags), {"log": str(log)})  # nothing left: no model is loaded
    assert third.returncode == 0
    assert log.read_text().count("build") == 1


def test_each_process_keeps_the_books_of_its_own_prompts(flags: list[str], tmp_path: Path) -> None:
    flags += ["--parallel", "prompts"]
    done = run([*launcher(2), SCRIPTED, *flags], {"fail": [[3, 1], [4, 0]]})
    assert done.returncode != 0
    lines = (tmp_path / "out" / "failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["JSON_idx"] for line in lines} == {3, 4}

    broken = run([*launcher(2), SCRIPTED, *flags], {"raise": [[3, 1]], "seconds_of": {"0": 4}})
    assert broken.returncode != 0
    lines = (tmp_path / "out" / "failures.jsonl").read_text().splitlines()
    reasons = {f["JSON_idx"]: f["reason"] for f in map(json.loads, lines)}
    assert set(reasons) <= {3, 4} and "KeyError" in reasons[3]

    again = run([*launcher(2), SCRIPTED, *flags])
    assert again.returncode == 0, again.stderr
    assert len(records(tmp_path / "out")) == 8
    assert not (tmp_path / "out" / "failures.jsonl").exists()


def test_stopping_one_process_stops_all_without_blame(flags: list[str], tmp_path: Path) -> None:
    """SIGTERM to one worker, as a batch system may send it to one machine only."""
    with begin([*launcher(2), SCRIPTED, *flags], {"seconds": 0.3}) as process:
        wait_for(lambda: len(records(tmp_path / "out")) >= 1)
        kill(workers(tmp_path / "out")[1:], signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert not (tmp_path / "out" / "failures.jsonl").exists(), errors
    assert "Traceback" not in errors.split("failed (exitcode")[0], errors


def test_a_full_disk_ends_the_run_and_keeps_what_there_is(flags: list[str], tmp_path: Path) -> None:
    """The limit lets small files through and stops the first large one half-way."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    first = run([*direct(*flags), "--num_prompts", "2"])
    assert first.returncode == 0, first.stderr
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.json")}
    done = run(direct(*flags), {"copies": 5000}, preexec_fn=limit)
    assert done.returncode == 1
    assert "prompt_0002.json could not be written: File too large" in done.stderr
    assert "run the same command to resume" in done.stderr
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.json")} == before
    assert not list((tmp_path / "out").glob(".*.tmp"))


# ---- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_run_with_their_code(
    flags: list[str], tmp_path: Path, number: int, code: int
) -> None:
    with begin(direct(*flags), {"seconds": 0.3}) as process:
        wait_for(lambda: len(records(tmp_path / "out")) >= 2)
        process.send_signal(number)
        start = time.monotonic()
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == code
    assert f"stopped by {signal.Signals(number).name}" in errors and "resumes" in errors
    assert "Traceback" not in errors
    assert run(direct(*flags)).returncode == 0
    assert len(records(tmp_path / "out")) == 8


def test_a_signal_during_one_long_call_ends_by_force(flags: list[str], tmp_path: Path) -> None:
    with begin(direct(*flags), {"block": [[1, 0]]}) as process:
        wait_for(lambda: len(records(tmp_path / "out")) == 1)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == 143
    assert "ended by force" in errors


# Stands between the launcher and a rank: hands signals on, and notes how the rank ended.
KEEPER = """
import os, runpy, signal, sys
from pathlib import Path

rank = os.fork()
if rank == 0:
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(rank, number))
code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
Path(sys.argv[1], "code." + os.environ["RANK"]).write_text(str(code))
sys.exit(code)
"""


@pytest.mark.parametrize("told", ["launcher", "everybody"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_two_processes_with_their_codes(
    flags: list[str], tmp_path: Path, number: int, code: int, told: str
) -> None:
    """Ctrl-C on a terminal reaches everybody, and the ranks a second time through the launcher.

    Each rank ends with 143 or 130. `accelerate launch` does not pass that on: its own end is an
    exception of torch's elastic agent, which is exit code 1.
    """
    (tmp_path / "keeper.py").write_text(KEEPER)
    line = [*launcher(2), str(tmp_path / "keeper.py"), str(tmp_path), SCRIPTED, *flags]
    with begin(line, {"seconds": 0.3}) as process:
        wait_for(lambda: len(records(tmp_path / "out")) >= 1)
        start = time.monotonic()
        if told == "launcher":
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert [(tmp_path / f"code.{rank}").read_text() for rank in range(2)] == [str(code)] * 2
    assert process.returncode == 1 and f"got signal: {number:d}" in errors
    assert f"stopped by {signal.Signals(number).name}; what is stored stays" in errors
    assert 1 <= len(records(tmp_path / "out")) < 8 and not workers(tmp_path / "out")
    assert not (tmp_path / "out" / "failures.jsonl").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_one_rank_is_the_code_of_all(
    flags: list[str], tmp_path: Path, number: int, code: int
) -> None:
    """The launcher names it in its table of failures, and ends with 1 itself.

    The other rank may hear of it from the launcher first, which sends SIGTERM.
    """
    with begin([*launcher(2), SCRIPTED, *flags], {"seconds": 0.3}) as process:
        wait_for(lambda: len(records(tmp_path / "out")) >= 1)
        start = time.monotonic()
        kill(workers(tmp_path / "out")[1:], number)
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    codes = re.findall(r"exitcode *: (-?[0-9]+) \(pid", errors)
    assert process.returncode == 1 and codes and set(codes) <= {str(code), "143", "-15"}, errors
    assert str(code) in codes


def test_killing_the_launcher_ends_its_processes(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begin([*launcher(2), SCRIPTED, *flags], {"seconds": 0.3}) as process:
        wait_for(lambda: len(records(out)) >= 1)
        assert len(workers(out)) == 2
        process.kill()
        wait_for(lambda: not workers(out), 10, "the end of the workers")
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert 1 <= len(records(out)) < 8


def test_two_runs_on_one_folder_at_once(flags: list[str], tmp_path: Path) -> None:
    with begin(direct(*flags), {"seconds": 0.5}) as first:
        wait_for(lambda: len(records(tmp_path / "out")) >= 1)
        second = run(direct(*flags))
        assert second.returncode == 2
        assert "in use by another run" in second.stderr
        kill(workers(tmp_path / "out"))
        first.communicate(timeout=30)
    assert run(direct(*flags)).returncode == 0  # a dead run leaves no lock


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
