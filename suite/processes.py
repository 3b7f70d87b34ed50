"""The processes of a run: who is who, handing results to the first, and noticing a dead one.

Results travel over the launcher's key-value store (TCP), not through collectives: a process may
take an hour on a prompt while the others wait, and no library timeout ends the wait. What ends it:
every process beats once a second on the store, and one that is silent for `SILENCE_SEC`, or that
said why it stops, stops all others. Errors are data: `gather` hands over outcomes of any kind.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from suite.stopping import Stopped, Stopping

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

log = logging.getLogger(__name__)

BEAT_SEC = 1.0
SILENCE_SEC = 25.0  # with a launcher's 30 s for a frozen process: within a minute
SHORTEST_POLL_SEC, LONGEST_POLL_SEC = 0.002, 0.1
CHUNK_BYTES = 4 * 2**20  # the store takes values of at most 8 MiB
LEFT = b"left"
LEAVING_SEC = 5.0
JOIN_TIMEOUT = timedelta(hours=2)  # another machine may still be downloading the models
STORE_TIMEOUT = timedelta(seconds=60)


class WrongLaunch(ValueError):
    """The number of processes is not what the launcher was asked for."""


class Processes:
    """This process among those of the run. `with Processes.start(stopping) as processes:`"""

    def __init__(
        self, rank: int, world_size: int, device: torch.device, store: dist.Store | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._store = store
        self._num_gathers = 0
        self._last_done: str | None = None
        self._aborted = False
        self._watcher: _Watcher | None = None

    @classmethod
    def start(cls, stopping: Stopping) -> Processes:
        """Joins the others; raises WrongLaunch where their number is not the launcher's."""
        import torch
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available(), timeout=JOIN_TIMEOUT)
        _check_launch(state.num_processes)
        processes = cls(state.process_index, state.num_processes, state.device)
        if state.num_processes > 1:
            processes._store = _connect()
            processes._watcher = _Watcher(processes.rank, processes.world_size, stopping)
            processes._watcher.start()
        return processes

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # ---- handing over ------------------------------------------------------------------------

    def gather(self, outcome: Any) -> list[Any] | None:
        """All outcomes in rank order on the first process, None on the others.

        Nobody returns before the first process has everything, so no process runs ahead by more
        than one prompt.
        """
        if self._store is None:
            return [outcome]
        name = f"gather/{self._num_gathers}"
        self._num_gathers += 1
        if not self.is_main:
            self._put(f"{name}/{self.rank}", outcome)
            self._await(f"{name}/done")
            return None
        outcomes = [outcome]
        outcomes += [self._take(f"{name}/{rank}") for rank in range(1, self.world_size)]
        if self._last_done is not None:
            self._store.delete_key(self._last_done)  # everybody is past it: they sent this turn's
        self._last_done = f"{name}/done"
        self._store.set(self._last_done, "1")
        return outcomes

    def broadcast(self, value: Any = None) -> Any:
        """The first process's value, on every process."""
        if self._store is None:
            return value
        name = f"broadcast/{self._num_gathers}"
        self._num_gathers += 1
        if self.is_main:
            self._put(name, value)
            return value
        return self._take(name, keep=True)

    def barrier(self) -> None:
        self.gather(None)

    def _put(self, name: str, value: Any) -> None:
        data = zlib.compress(json.dumps(value).encode("ascii"), level=1)
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            self._store.set(f"{name}/{index}", chunk)
        self._store.set(name, str(len(chunks)))

    def _take(self, name: str, keep: bool = False) -> Any:
        self._await(name)
        names = [f"{name}/{index}" for index in range(int(self._store.get(name)))]
        data = b"".join(self._store.get(part) for part in names)
        for part in () if keep else (*names, name):
            self._store.delete_key(part)
        return json.loads(zlib.decompress(data))

    def _await(self, name: str) -> None:
        """Polls: a blocking wait would hide this process's stop signals and the store's end."""
        pause = SHORTEST_POLL_SEC
        while not self._store.check([name]):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SEC)

    # ---- leaving -----------------------------------------------------------------------------

    def abort(self, reason: str, exit_code: int = 1) -> None:
        """Tells the others to stop, why and with which code. The first reason counts."""
        if self._watcher is not None:
            self._aborted = True
            self._watcher.abort(f"{exit_code} {reason}")

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Stopped):
            self.abort(f"process {self.rank}: {error.reason}", error.exit_code)
        elif error is not None:
            self.abort(f"process {self.rank}: {type(error).__name__}: {error}")
        self.close(in_order=error is None)

    def why_stopped(self) -> tuple[int, str] | None:
        """Exit code and reason that a process gave for stopping everybody, if one did."""
        return self._watcher.told() if self._watcher is not None else None

    def close(self, in_order: bool = True) -> None:
        """Ends the beat. In good order, the others no longer wait for this process's."""
        if self._watcher is not None:
            in_order = in_order and not self._aborted
            self._watcher.leave(in_order)
            if in_order and self.is_main:
                self._watcher.wait_for_leaving(LEAVING_SEC)
        if self._store is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


class _Watcher(threading.Thread):
    """Beats for this process and looks at the others' beats, over a connection of its own."""

    def __init__(self, rank: int, world_size: int, stopping: Stopping) -> None:
        super().__init__(name="watcher", daemon=True)
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._stopping = stopping
        self._store = _connect()
        self._mutex = threading.Lock()  # the connection is used from two threads
        self._ended = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}

    def run(self) -> None:
        beats = 0
        while not self._ended.wait(BEAT_SEC):
            beats += 1
            try:
                with self._mutex:
                    self._store.set(f"beat/{self._rank}", str(beats))
                    why = self._abort() or self._silent()
            except RuntimeError as e:  # torch's DistError and its kin: the store is gone
                why = 1, f"the launcher's store can't be reached ({str(e).splitlines()[0][:120]})"
            if why and not self._ended.is_set():
                self._stopping.stop(why[1], exit_code=why[0])
                return

    def _abort(self) -> tuple[int, str] | None:
        if not self._store.check(["abort"]):
            return None
        code, _, reason = self._store.get("abort").decode("utf-8", "replace").partition(" ")
        return int(code), reason

    def _silent(self) -> tuple[int, str] | None:
        now = time.monotonic()
        for rank in self._others:
            name = f"beat/{rank}"
            beat = self._store.get(name) if self._store.check([name]) else b""
            last, since = self._seen.setdefault(rank, (beat, now))
            if beat != last:
                self._seen[rank] = (beat, now)
            elif beat != LEFT and now - since > SILENCE_SEC:
                return 1, f"process {rank} has given no sign of life for {now - since:.0f} s"
        return None

    def abort(self, reason: str) -> None:
        self._ended.set()
        try:
            with self._mutex:
                self._store.compare_set("abort", "", reason[:4000])
        except RuntimeError as e:
            log.warning("the other processes could not be told to stop: %s", e)

    def told(self) -> tuple[int, str] | None:
        try:
            with self._mutex:
                return self._abort()
        except RuntimeError as e:
            log.debug("the store went first: %s", e)
        return None

    def leave(self, in_order: bool) -> None:
        self._ended.set()
        try:
            if in_order:
                with self._mutex:
                    self._store.set(f"beat/{self._rank}", LEFT)
        except RuntimeError as e:
            log.debug("the store went first: %s", e)

    def wait_for_leaving(self, seconds: float) -> None:
        """NOTE: the store may live in the first process, and the others still read from it."""
        names = [f"beat/{rank}" for rank in self._others]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(RuntimeError), self._mutex:
                if all(self._store.check([n]) and self._store.get(n) == LEFT for n in names):
                    return
            time.sleep(LONGEST_POLL_SEC)


def _connect() -> dist.Store:
    """A connection of our own to the launcher's store, with keys that no library uses."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"suite/{attempt}", store)


def _check_launch(num_processes: int) -> None:
    wanted = _wanted()
    if wanted is not None and wanted != num_processes:
        raise WrongLaunch(
            f"the launcher was asked for {wanted} processes, but this one sees {num_processes}: "
            "each would write the same files. For several processes use accelerate launch "
            f"--multi_gpu --num_processes {wanted} (on a machine without GPUs too)"
        )


def _wanted() -> int | None:
    """The world size in the environment, or else in the line of the launcher that started us."""
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"])
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or sys.platform != "linux":
        return None
    try:
        line = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r"\0--num[_-]processes[=\0]([0-9]+)\0", line.split("main.py")[0] + "\0")
    return max(1, int(found[1])) if found else None
