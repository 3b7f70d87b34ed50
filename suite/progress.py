"""What a person sees during a run: a bar over prompts, the state within a prompt, each best answer.

Speaks on the first process only. The bar is drawn on a terminal only; the one line at the end of
each prompt is printed always, so that a log file has it too. Never raises for want of a field,
or of somebody who listens.
"""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Any, TextIO

REDRAW_SEC = 0.1
BAR_WIDTH = 20


class Progress:
    """`update` within a prompt, `finish` or `fail` after it; draws nothing unless it may speak."""

    def __init__(
        self, total: int, done: int = 0, speaks: bool = True, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr  # None where the process was started without one
        self._total = total
        self._done = done
        self._speaks = speaks and self._stream is not None
        self._draws = self._speaks and self._stream.isatty()
        self._start = time.monotonic()
        self._drawn_at = 0.0
        self._num_here = 0
        self._state = ""

    def __enter__(self) -> Progress:
        self._draw(force=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()

    def update(
        self, *, rows: int | None = None, length: int | None = None, round: int | None = None
    ) -> None:
        """Where the current prompt stands; cheap enough to call at every look at the device."""
        if not self._draws:
            return
        named = (("rows", rows), ("length", length), ("round", round))
        self._state = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        self._draw()

    def finish(self, json_idx: int, objects: list[dict[str, Any]]) -> None:
        """One line about a prompt that is stored: its best answer, score, tokens, seconds."""
        self._advance(f"prompt {json_idx}: {summary(objects)}")

    def fail(self, json_idx: int, reason: str) -> None:
        self._advance(f"prompt {json_idx}: failed: {_shorten(reason, 200)}")

    def say(self, text: str) -> None:
        if self._speaks:
            self._clear()
            self._write(text + "\n")

    def _advance(self, line: str) -> None:
        self._done += 1
        self._num_here += 1
        self._state = ""
        self.say(line)
        self._draw(force=True)

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if not self._draws or (not force and now - self._drawn_at < REDRAW_SEC):
            return
        self._drawn_at = now
        filled = BAR_WIDTH * self._done // max(1, self._total)
        bar = "#" * filled + "-" * (BAR_WIDTH - filled)
        line = f"[{bar}] {self._done}/{self._total} prompts{self._time_left(now)}  {self._state}"
        width = shutil.get_terminal_size().columns - 1
        self._write("\r\x1b[K" + line[:width])

    def _time_left(self, now: float) -> str:
        if self._num_here == 0 or self._done >= self._total:
            return ""
        seconds = (now - self._start) / self._num_here * (self._total - self._done)
        minutes, seconds = divmod(int(seconds), 60)
        return f", {minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"

    def _clear(self) -> None:
        if self._draws:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        """A log whose disk is full or whose reader has gone ends no run: it falls silent."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._speaks = self._draws = False


def best_trajectory(objects: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The answer with the highest score; ties go to the earlier process and candidate."""
    scored = [t for o in objects for t in o.get("trajectories", []) if t.get("score") is not None]
    return max(scored, key=lambda t: t["score"], default=None)


def summary(objects: list[dict[str, Any]]) -> str:
    """`best -0.312 of 20 (64 tokens): "The sky..."; 1,280 tokens, 12.1 s`."""
    skipped = next((o["skipped"] for o in objects if o.get("skipped")), None)
    if skipped:
        return f"skipped: {_shorten(skipped, 200)}"
    tokens = sum(o.get("tokens_generated") or 0 for o in objects)
    seconds = max((o.get("elapsed_sec") or 0.0 for o in objects), default=0.0)
    cost = f"{tokens:,} tokens, {seconds:.1f} s"
    best = best_trajectory(objects)
    if best is None:
        return f"no scored answer; {cost}"
    number = sum(len(o.get("trajectories", [])) for o in objects)
    cut = sum(len(o.get("rejected") or ()) for o in objects)
    of = f"{number} ({cut} cut)" if cut else str(number)
    text = _shorten(str(best.get("output", "")), 60)
    length = best.get("num_tokens")
    how_long = f" ({length} tokens)" if length is not None else ""
    return f'best {best["score"]:.4g} of {of}{how_long}: "{text}"; {cost}'


def _shorten(text: str, width: int) -> str:
    """One line of printable text; a terminal must not run what a model wrote."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= width else line[: width - 3] + "..."
