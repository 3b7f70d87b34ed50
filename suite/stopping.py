"""Ctrl-C, SIGTERM and a launcher's death end a run within seconds, with the right exit code.

The first signal raises `Stopped` in the main thread; `main` unwinds and returns its code. Python
runs handlers between bytecodes only, so a thread reads the signal's number from a pipe (the system
writes it at once) and ends the process by force where the main thread sits too long in one call.
The files need no care: `suite.files` writes whole files or none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

GRACE_SEC = 7.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """The run was told to stop. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


class Stopping:
    """While entered, signals become `Stopped`; at most one is raised."""

    def __init__(self) -> None:
        self._raised = False
        self._left = threading.Event()
        self._pending: Stopped | None = None
        self._previous: dict[int, object] = {}
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)

    def __enter__(self) -> Stopping:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stopping", daemon=True).start()
        _end_with_launcher()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        os.close(self._write_end)  # the thread reads the end of the pipe and leaves

    def stop(self, reason: str, exit_code: int) -> None:
        """Called from another thread: raises Stopped in the main thread, by force if need be."""
        if self._pending is None:
            self._pending = Stopped(reason, exit_code)
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        self._raised = True
        raise self._pending or Stopped(f"stopped by {signal.Signals(number).name}", 128 + number)

    def _watch(self) -> None:
        while received := os.read(self._read_end, 1):
            if received[0] in SIGNALS:
                code = self._pending.exit_code if self._pending else 128 + received[0]
                threading.Thread(target=self._force, args=(code,), daemon=True).start()
        os.close(self._read_end)

    def _force(self, exit_code: int) -> None:
        if not self._left.wait(GRACE_SEC):
            print("main.py: still busy after a stop signal; ended by force", file=sys.stderr)
            sys.stderr.flush()
            os._exit(exit_code)


def _end_with_launcher() -> None:
    """Under `accelerate launch`, a killed launcher must not leave its processes running."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
