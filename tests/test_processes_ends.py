"""How runs of several processes end: exceptions, kills, signals, full disks, two at once."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.launch import SCRIPTED, begin, direct, kill, launcher, records, run, wait_for, workers

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
    with begin(direct(*flags), {"seconds": 4}) as first:
        wait_for(lambda: len(records(tmp_path / "out")) >= 1)
        second = run(direct(*flags))
        assert second.returncode == 2
        assert "in use by another run" in second.stderr
        kill(workers(tmp_path / "out"))
        first.communicate(timeout=30)
    assert run(direct(*flags)).returncode == 0  # a dead run leaves no lock
