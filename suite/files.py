"""Files that are whole or not there, strict JSON, and the lock of a folder.

Knows nothing of runs or prompts. The one invariant: `write_whole` leaves either the old content of
a path or the new one, whatever happens meanwhile (kill, full disk, power cut).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class InUse(RuntimeError):
    """Another process holds the folder's lock; the message says which."""


class NotWritten(RuntimeError):
    """A record could not be stored: the disk is full or gone. Earlier files are whole."""


class NotJson(ValueError):
    """A record holds something that strict JSON can't say, such as NaN; names the place."""


class FolderLock:
    """An exclusive lock, kept by an open file: it ends with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        path = folder / ".lock"
        self._handle: int | None = open_here(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            owner = os.pread(self._handle, 200, 0).decode("utf-8", "replace").strip()
            self.release()
            raise InUse(owner or "unknown process") from e
        except OSError as e:
            log.warning("%s can't be locked (%s); start no second run on it", folder, e.strerror)
        os.truncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        # A forked child must not keep the lock alive after its parent's death.
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None


def open_here(path: Path, flags: int) -> int:
    """A handle of this very file: a link that lies there could lead out of the folder."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def write_whole(path: Path, content: str | bytes) -> os.stat_result:
    """Writes beside, flushes to the disk, renames, and flushes the folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.unlink(missing_ok=True)
        with os.fdopen(open_here(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
            stat = os.fstat(file.fileno())
        os.replace(beside, path)
        _flush_folder(path.parent)
    except OSError as e:
        with suppress(OSError):
            beside.unlink()
        raise NotWritten(
            f"{path} could not be written: {e.strerror or e}. Files written before are whole; make "
            "room or choose another --output_folder, then run the same command to resume"
        ) from e
    return stat


def _flush_folder(folder: Path) -> None:
    """Makes the rename itself survive a power cut, where the file system allows it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def fingerprint(text: str) -> str:
    """24 hexadecimal digits that tell texts apart."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def dumps_strict(objects: list[dict[str, Any]], indent: int | None) -> str:
    try:
        return json.dumps(objects, allow_nan=False, indent=indent)
    except (ValueError, TypeError) as e:
        place, value = next(_not_json(objects), ("somewhere", e))
        raise NotJson(f"{place} is {value!r}, which strict JSON can't hold") from e


def _not_json(value: Any, place: str = "record") -> Iterator[tuple[str, Any]]:
    """The places whose value has no strict JSON form."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_json(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_json(inner, f"{place}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield place, value
    elif not isinstance(value, str | int | float | None):
        yield place, type(value)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file of ours; lines that a crash cut short are left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as e:
        log.warning("%s can't be read (%s)", path, e.strerror)
        return []
    entries = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                entries.append(entry)
    return entries
