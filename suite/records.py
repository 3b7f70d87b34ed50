"""A run's folder: one JSON file a prompt, who may write there, and what is done already.

`.finished.*.jsonl` notes size, time and settings of every file written, so that a resume need not
parse a hundred thousand of them; a file that differs from its note in any way is parsed again. The
one invariant: what `finished` names is complete, holds that prompt and was made with these
settings; anything else is redone or refused.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from suite.files import (
    FolderLock,
    InUse,
    NotJson,
    NotWritten,
    dumps_strict,
    fingerprint,
    json_lines,
    open_here,
    write_whole,
)
from suite.prompts import Prompt
from suite.settings import Settings, base_name, settings_for_record, settings_for_sameness

__all__ = ["FolderRefused", "NotJson", "NotWritten", "RunFolder"]

log = logging.getLogger(__name__)

LARGEST_RECORD_BYTES = 4 * 2**30
OURS = re.compile(r"(?P<models>.+)_prompt_(?P<index>[0-9]{4,13})\.json")
FAILURES = "failures.jsonl"
LEFT_OVER = re.compile(
    r"\.(probe|failures\.jsonl|\.finished\.0\.jsonl|memory_process_[0-9]+\.pickle|"
    r".+_prompt_[0-9]{4,13}(\.json|\.hidden\.[0-9]+\.safetensors))\.[0-9]+\.tmp"
)


class FolderRefused(ValueError):
    """The folder can't be used for this run: other settings, another run, or not writable."""


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """One line of the list of finished files."""

    file: str
    size: int
    mtime_ns: int
    prompt: str  # fingerprint of the prompt's text
    run: str  # fingerprint of the settings


class RunFolder:
    """The files of one run. Its first process opens it; others may write their own prompts."""

    def __init__(self, folder: Path, settings: Settings, num_processes: int, rank: int = 0) -> None:
        self.folder = Path(folder).absolute()  # a user's function may change the working folder
        self._settings = settings
        self._rank = rank
        self.is_shared = settings.parallel == "candidates"  # every process works on every prompt
        self._num_objects = num_processes if self.is_shared else 1
        self._models = f"{base_name(settings.llm_name)}_{base_name(settings.reward_model_name)}"
        self._same = _sameness(settings_for_record(settings), self._num_objects)
        self._run = fingerprint(json.dumps(self._same, sort_keys=True))
        self._failed: set[int] | None = None  # read when first needed
        self._lock: FolderLock | None = None

    def path(self, json_idx: int) -> Path:
        return self.folder / f"{self._models}_prompt_{json_idx:04d}.json"

    # ---- opening and closing -----------------------------------------------------------------

    def open(self) -> None:
        """Makes the folder, takes its lock and removes what a killed run left half-written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder)
            self._try_to_write()
        except InUse as e:
            raise FolderRefused(
                f"--output_folder {self.folder} is in use by another run ({e}); wait for it, or "
                "choose another folder"
            ) from e
        except OSError as e:
            self.close()
            raise FolderRefused(
                f"--output_folder {self.folder} can't be written ({e.strerror}); choose another"
            ) from e
        for entry in list(os.scandir(self.folder)):
            if LEFT_OVER.fullmatch(entry.name):
                os.unlink(entry.path)

    def _try_to_write(self) -> None:
        probe = self.folder / f".probe.{os.getpid()}.tmp"
        probe.write_bytes(b"1")
        probe.unlink()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the lock back; a run that dies gives it back too, since the system drops it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ---- what is done ------------------------------------------------------------------------

    def finished(self, prompts: Sequence[Prompt]) -> set[int]:
        """The JSON_idx of the prompts that are done; FolderRefused for another run's folder."""
        lines = self._read_notes()
        notes = {note.file: note for note in lines if note is not None}
        by_name = {self.path(p.json_idx).name: p for p in prompts}
        done: set[int] = set()
        kept: list[Note] = []
        fresh = False
        for entry in os.scandir(self.folder):
            if not OURS.fullmatch(entry.name) or not entry.is_file():
                continue
            prompt = by_name.get(entry.name)
            note = notes.get(entry.name)
            if note is None or not self._holds(note, entry.stat(), prompt):
                note, fresh = self._inspect(Path(entry.path), prompt), True
            if note is not None:
                kept.append(note)
                if prompt is not None:
                    done.add(prompt.json_idx)
        if fresh or len(kept) != len(lines):
            self._rewrite_notes(kept)
        return done

    def _holds(self, note: Note, stat: os.stat_result, prompt: Prompt | None) -> bool:
        return (
            (note.size, note.mtime_ns, note.run) == (stat.st_size, stat.st_mtime_ns, self._run)
            and (prompt is None or note.prompt == fingerprint(prompt.prompt))
        )  # fmt: skip

    def _inspect(self, path: Path, prompt: Prompt | None) -> Note | None:
        """Parses a file; None when it is not a whole record of ours, and so is to be (re)done."""
        ours = path.name.startswith(f"{self._models}_prompt_")
        try:
            stat = path.stat()
            objects = _read_record(path, stat.st_size)
        except (OSError, ValueError) as e:
            if ours:
                log.warning("%s is not a whole record (%s); its prompt is done again", path.name, e)
            return None
        for item in objects:
            self._refuse_others(path, item, len(objects), prompt)
            if prompt is not None and item["prompt"]["JSON_idx"] != prompt.json_idx:
                log.warning("%s holds another JSON_idx; its prompt is done again", path.name)
                return None
        text = fingerprint(objects[0]["prompt"]["prompt"])
        return Note(path.name, stat.st_size, stat.st_mtime_ns, text, self._run)

    def _refuse_others(
        self, path: Path, item: dict[str, Any], num_objects: int, prompt: Prompt | None
    ) -> None:
        """Raises FolderRefused, with names and both values, where a record is not of this run."""
        theirs = _sameness(item, num_objects)
        differing = [
            f"{name} is {theirs[name]!r} there, {value!r} now"
            for name, value in self._same.items()
            if theirs[name] != value
        ]
        if differing:
            raise FolderRefused(
                f"--output_folder {self.folder} holds a run with other settings: "
                f"{'; '.join(differing)} ({path.name}). Choose another --output_folder, or the "
                "same settings to resume"
            )
        same_place = prompt is not None and item["prompt"]["JSON_idx"] == prompt.json_idx
        if same_place and item["prompt"]["prompt"] != prompt.prompt:
            raise FolderRefused(
                f"--output_folder {self.folder} holds answers to another prompt with JSON_idx "
                f"{prompt.json_idx}, made from another --data_filename; choose another folder"
            )

    # ---- writing -----------------------------------------------------------------------------

    def write(self, prompt: Prompt, objects: list[dict[str, Any]]) -> Path:
        """Stores the objects of a prompt, in rank order; the file appears whole or not at all."""
        if len(objects) != self._num_objects:
            raise AssertionError(f"{len(objects)} objects for {self._num_objects} processes")
        path = self.path(prompt.json_idx)
        content = dumps_strict(objects, 4 if self._settings.pretty_print_output else None)
        stat = write_whole(path, content)
        text = fingerprint(prompt.prompt)
        self._append_note(Note(path.name, stat.st_size, stat.st_mtime_ns, text, self._run))
        if prompt.json_idx in self._known_failures():
            self._clear_failure(prompt.json_idx)
        return path

    # ---- failures ----------------------------------------------------------------------------

    def failures(self) -> list[dict[str, Any]]:
        """The prompts that failed and were not done since: JSON_idx, prompt, reason."""
        lines = json_lines(self.folder / FAILURES)
        return [line for line in lines if isinstance(line.get("JSON_idx"), int)]

    def record_failure(self, prompt: Prompt, reason: str) -> None:
        """Notes a prompt that failed; the next run of the folder tries it again."""
        entry = {"JSON_idx": prompt.json_idx, "prompt": prompt.prompt[:200], "reason": reason}
        with self._failures_locked():
            others = [f for f in self.failures() if f["JSON_idx"] != prompt.json_idx]
            self._rewrite_failures([*others, entry])
        self._known_failures().add(prompt.json_idx)

    def _known_failures(self) -> set[int]:
        """Those of earlier runs and of this process; another process clears its own."""
        if self._failed is None:
            self._failed = {f["JSON_idx"] for f in self.failures()}
        return self._failed

    def _clear_failure(self, json_idx: int) -> None:
        with self._failures_locked():
            self._rewrite_failures([f for f in self.failures() if f["JSON_idx"] != json_idx])
        self._known_failures().discard(json_idx)

    def _rewrite_failures(self, entries: list[dict[str, Any]]) -> None:
        path = self.folder / FAILURES
        if entries:
            write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))
        else:
            path.unlink(missing_ok=True)

    @contextmanager
    def _failures_locked(self) -> Iterator[None]:
        """Several processes write failures when each takes its own prompts."""
        try:
            handle = open_here(self.folder / ".failures.lock", os.O_WRONLY | os.O_CREAT)
            with os.fdopen(handle, "w") as file:
                with suppress(OSError):  # the folder's own lock has said so already
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as e:
            raise NotWritten(f"{self.folder / FAILURES} could not be written: {e}") from e

    # ---- the list of finished files ----------------------------------------------------------

    def _read_notes(self) -> list[Note | None]:
        """A note for each line of the lists, None for a line that a crash cut short."""
        notes: list[Note | None] = []
        for path in sorted(self.folder.glob(".finished.*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
                try:
                    note = Note(**json.loads(line))
                except (ValueError, TypeError, RecursionError):
                    note = None
                notes.append(note if note is not None and isinstance(note.file, str) else None)
        return notes

    def _append_note(self, note: Note) -> None:
        """NOTE: a note that a crash cut short is not read, and its file is then parsed instead."""
        path = self.folder / f".finished.{self._rank}.jsonl"
        try:
            handle = open_here(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(handle, "a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(note)) + "\n")
        except OSError as e:
            log.warning("%s could not be written (%s); the next resume is slower", path.name, e)

    def _rewrite_notes(self, notes: Iterable[Note]) -> None:
        content = "".join(json.dumps(dataclasses.asdict(note)) + "\n" for note in notes)
        write_whole(self.folder / ".finished.0.jsonl", content)
        for path in self.folder.glob(".finished.*.jsonl"):
            if path.name != ".finished.0.jsonl":
                path.unlink()


def _sameness(recorded: dict[str, Any], num_objects: int) -> dict[str, Any]:
    """What must agree, by name; one object a file and one a process are told apart by number."""
    same = settings_for_sameness(recorded)
    return {**same, "num_processes": num_objects if same["parallel"] == "candidates" else 1}


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _read_record(path: Path, size: int) -> list[dict[str, Any]]:
    """The objects of a record file; ValueError says in a few words why it is none."""
    if size == 0:
        raise ValueError("it is empty")
    if size > LARGEST_RECORD_BYTES:
        raise ValueError(f"it has {size:,} bytes")
    try:
        objects = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON: {e}") from e
    if not isinstance(objects, list) or not objects:
        raise ValueError("not a list of objects")
    for item in objects:
        prompt = item.get("prompt") if isinstance(item, dict) else None
        if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt"), str):
            raise ValueError("an object without its prompt")
        if not isinstance(item.get("trajectories"), list) or "JSON_idx" not in prompt:
            raise ValueError("an object without trajectories")
    return objects
