"""The experiment's archive: one strict JSON line a prompt and configuration, compact.

A line holds scores of all, the text of the winner alone, costs, and the rounds in numbers; the
scores of a pool are stored exactly. A hundred prompts take 24 MB. Lines that a crash cut short, or
that are otherwise damaged, are not read, so what they stood for is done again. The invariant: a
folder holds one experiment; another's settings are refused by name, except for EXTENT's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiment_plan import (
    EXTENT,
    FILES,
    GROWING,
    PARTIAL,
    POOL,
    SELF_POOL,
    Config,
    Size,
)
from benchmarks.experiment_whole import (
    ROUND_FIELDS,
    is_whole,
    is_whole_session,
    wrong_settings,
)
from postprocess.stats import spearman
from suite.files import FolderLock, InUse, dumps_strict, fingerprint, json_lines, write_whole
from suite.prompts import Prompt
from suite.settings import Settings, settings_for_sameness

log = logging.getLogger(__name__)

Line = dict[str, Any]
SETTINGS, PROMPTS = "settings.json", "prompts.json"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes the folder and holds its lock: two runs would do and store the same tasks twice."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {folder} can't be made a folder ({error.strerror}); give another"
        ) from error
    try:
        lock = FolderLock(folder)
    except InUse as error:
        raise ValueError(
            f"--out {folder} is in use by another run ({error}); wait for it, or give another "
            "folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


class Archive:
    """The folder with the lines; `done` is by (JSON_idx, configuration)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[tuple[int, str], Line] = {}
        for name in FILES:
            lines = json_lines(self.path(name))
            sound = [line for line in lines if is_whole(line)]
            self.done |= {(line["JSON_idx"], line["config"]): line for line in sound}
            if damaged := len(lines) - len(sound):
                log.warning("%s: %d damaged lines are not read", self.path(name), damaged)

    def path(self, file: str) -> Path:
        return self.folder / f"{file}.jsonl"

    def claim(self, base: Settings, size: Size, prompts: Sequence[Prompt]) -> None:
        """Makes the folder this experiment's; ValueError where it is another's.

        EXTENT may differ: of GROWING the largest stay, the chunks are the last call's.
        """
        if self.done and not (self.folder / SETTINGS).exists():
            raise ValueError(
                f"--out {self.folder} has results but no {SETTINGS}: what they were made with is "
                "not known; bring that file back, or give another folder"
            )
        mine = settings_for_sameness(dataclasses.asdict(base)) | {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(size).items()
        }
        if self.done:  # else nothing is lost, a mistyped first command included
            theirs, grown = self.settings(), self.size()
            self._check_settings(theirs, mine)
            largest = {key: max(getattr(grown, key), getattr(size, key)) for key in GROWING}
            mine = theirs | mine | largest
        known = self.check_prompts(prompts)
        for name, stored in ((SETTINGS, mine), (PROMPTS, known)):
            write_whole(self.folder / name, json.dumps(stored, indent=1, allow_nan=False) + "\n")

    def check_prompts(self, prompts: Sequence[Prompt]) -> dict[str, str]:
        """Fingerprints by JSON_idx, those stored and these; ValueError where a prompt that has been
        answered has another text there."""
        path = self.folder / PROMPTS
        known = _object_in(path) if path.exists() else {}
        if self.done and not known:
            log.warning("%s is missing: whether prompts are the same can't be told", path)
        answered = {str(idx) for idx, _ in self.done}
        own = {str(prompt.json_idx): fingerprint(prompt.prompt) for prompt in prompts}
        for idx in sorted(answered & known.keys() & own.keys(), key=int):
            if known[idx] != own[idx]:
                raise ValueError(
                    f"--data_filename: prompt {idx} has another text than the one that "
                    f"{self.folder} holds answers to; give that file, or another folder"
                )
        return known | own

    def _check_settings(self, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
        differing = [f"{k} is {theirs.get(k)!r} there, {v!r} now" for k, v in mine.items()
                     if k not in EXTENT and theirs.get(k) != v]  # fmt: skip
        if differing:
            raise ValueError(
                f"--out {self.folder} holds another experiment: {'; '.join(differing)}; give "
                "another folder, or the same settings to go on"
            )

    def settings(self) -> dict[str, Any]:
        stored = _object_in(self.folder / SETTINGS)
        if wrong := wrong_settings(stored):
            raise ValueError(f"{self.folder / SETTINGS} is damaged: {', '.join(wrong)}")
        return stored

    def size(self) -> Size:
        """The size that the folder was made with, and grown to."""
        stored = self.settings()
        names = [field.name for field in dataclasses.fields(Size)]
        if missing := [name for name in names if name not in stored]:
            raise ValueError(f"{self.folder / SETTINGS} lacks {', '.join(missing)}")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        try:
            return Size(**{name: values[name] for name in names})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.folder / SETTINGS} is damaged: {error}") from error

    def add(self, file: str, line: Line) -> None:
        self._append(file, line)
        self.done[line["JSON_idx"], line["config"]] = line

    def add_session(self, entry: dict[str, Any]) -> None:
        """What the log needs of one call: date, device, versions, command, seconds."""
        self._append("sessions", entry)

    def sessions(self) -> list[dict[str, Any]]:
        lines = json_lines(self.path("sessions"))
        sound = [line for line in lines if is_whole_session(line)]
        if damaged := len(lines) - len(sound):
            log.warning("%s: %d damaged lines are not read", self.path("sessions"), damaged)
        return sound

    def _append(self, file: str, entry: dict[str, Any]) -> None:
        text = dumps_strict([entry], None)[1:-1]
        path = self.path(file)
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as stream:
            stream.write(("\n" if torn else "") + text + "\n")


def _object_in(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return found


def failed_line(json_idx: int, config: Config, reason: str) -> Line:
    return {"JSON_idx": json_idx, "config": config.name, "failed": reason}


def line_of(json_idx: int, config: Config, items: Sequence[dict[str, Any]], text_of: Any) -> Line:
    """One configuration's result; `items` are its blocks, by process seed."""
    best, item = max(
        ((_best(item), item) for item in items), key=lambda pair: pair[0]["score"]
    )  # the first of equals: the lowest seed
    capture = sum(item["capture_sec"] for item in items)
    line = {
        "JSON_idx": json_idx,
        "config": config.name,
        "num_prompt_tokens": items[0]["num_prompt_tokens"],
        "elapsed_sec": sum(item["elapsed_sec"] for item in items) - capture,
        "generation_sec": sum(_seconds(item, "generation") for item in items) - capture,
        "reward_sec": sum(_seconds(item, "reward") for item in items),
        "capture_sec": capture,
        "tokens_generated": sum(item["tokens_generated"] for item in items),
        "tokens_scored": sum(item["tokens_scored"] for item in items),
        "out_of_memory_splits": sum(item["out_of_memory_splits"] for item in items),
        "num_completed": sum(len(item["trajectories"]) for item in items),
        "num_failed_rows": sum(len(item["failed_rows"]) for item in items),
        "best": {
            "process_seed": item["process_seed"],
            **{key: best[key] for key in ("candidate", "score", "num_tokens", "finish_reason")},
            "output": text_of(best),
        },
    }
    return line | _details(config, items, text_of)


def _winners(items: Sequence[dict[str, Any]], text_of: Any) -> list[dict[str, Any]]:
    """The best of the pool's first candidates, wherever it changes: Best-of-n for every n."""
    every = [(item["process_seed"], t) for item in items for t in item["trajectories"]]
    found: list[dict[str, Any]] = []
    for place, (seed, t) in enumerate(every):
        if found and t["score"] <= every[found[-1]["place"]][1]["score"]:
            continue
        found.append({"place": place, "process_seed": seed, "candidate": t["candidate"]})
    return [{**entry, "output": text_of(every[entry["place"]][1])} for entry in found]


def _details(config: Config, items: Sequence[dict[str, Any]], text_of: Any) -> dict[str, Any]:
    if config.name in (POOL, SELF_POOL):
        return {
            "process_seeds": [item["process_seed"] for item in items],
            "winners": _winners(items, text_of),
            "scores": [exact(t["score"]) for item in items for t in item["trajectories"]],
            "num_tokens": [t["num_tokens"] for item in items for t in item["trajectories"]],
        }
    (item,) = items
    final = {t["candidate"]: t["score"] for t in item["trajectories"]}
    if config.name == PARTIAL:
        found = item.get("partials", {})
        pairs = {length: dict(map(tuple, scores)) for length, scores in found.items()}
        return {"partials": {n: correlation(scores, final) for n, scores in pairs.items()}}
    if config.file == "timing":
        return {}
    ends = [t["score"] for t in item["trajectories"]]
    return {
        "start_rows": len(ends) + len(item["rejected"]) + len(item["failed_rows"]),
        "scores": [round(score, 4) for score in ends],
        "rounds": [_round(entry, final) for entry in item["rounds"]],
    }


def _round(entry: dict[str, Any], final: dict[int, float]) -> dict[str, Any]:
    """A round's numbers, and how its scores rank those who were finished later."""
    is_last = entry["cutoff"] is None
    scores = dict(zip(entry["candidates"], entry["scores"], strict=True))
    known = {} if is_last else {"partial": correlation(scores, final)}
    return {key: entry[key] for key in ROUND_FIELDS} | known


def correlation(
    partial: dict[int, float | None], final: dict[int, float]
) -> list[float | int | None]:
    """[pairs, Spearman's rank correlation or None] over the candidates that have both."""
    both = [c for c, score in partial.items() if score is not None and c in final]
    early, late = (np.array([of[c] for c in both], dtype=float) for of in (partial, final))
    return [len(both), spearman(early, late)]


def exact(score: float) -> float:
    """As pools are stored: nine digits, which tell float32 values apart; scores are float32."""
    return float(f"{score:.9g}")


def _best(item: dict[str, Any]) -> dict[str, Any]:
    return max(item["trajectories"], key=lambda t: (t["score"], -t["candidate"]))


def _seconds(item: dict[str, Any], prefix: str) -> float:
    return math.fsum(sec for phase, sec in item["clock"] if phase.startswith(prefix))
