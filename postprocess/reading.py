"""Reads one prompt's JSON file: bytes in, checked objects and a summary out.

Accepts our files and the paper repository's (a list of objects with `trajectories`, `clock`,
`elapsed_sec` and the arguments). Whatever is wrong with a file is one `BadFile` that names the
file and the fault; nothing else leaves here. A score that is not a finite number, or
beyond MAX_SCORE, is no fault of the file: its trajectory can't win and is counted. The invariant:
what the summary says follows from finite numbers alone. Nothing here writes or prints.
"""

from __future__ import annotations

import dataclasses
import json
import math
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.settings import NOT_FOR_SAMENESS, Settings

# Best-of-3840 with long answers is some 120 MB; anything far above is not ours, and parsing takes
# about ten times the file's size in memory.
MAX_FILE_BYTES = 256 * 2**20
# A hostile 256 MB of "[],[],..." would take 6 GB once parsed. 3840 candidates x 2000 token ids are
# 8 million values.
MAX_VALUES = 16_000_000
MAX_NAME_CHARS = 1000  # a name may be a path
# No model scores beyond this, and within it sums and ratios of scores stay finite.
MAX_SCORE = 1e100
MAX_SECONDS = 1e12

# The arguments that a file may hold. Everything else in an object is a measurement or the prompt.
SETTINGS = frozenset({field.name for field in dataclasses.fields(Settings)} | {"num_processes"})
# Told apart by their own fields: merged runs differ in these by design.
NOT_COMPARED = NOT_FOR_SAMENESS | {"seed"}


class BadFile(ValueError):
    """A file that can't be used, with its name and the reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One trajectory that can win."""

    output: str
    score: float
    object_index: int
    candidate: int


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What one file says about one prompt.

    Time rule: the objects ran side by side (processes of a run, and runs merged by concat_json.py),
    so the seconds are those of the slowest object and the GPUs are the number of objects. Tokens
    add up, peak memory is the maximum.
    """

    path: Path
    json_idx: int
    prompt: str | None
    settings: dict[str, Any]
    seed: int | None
    process_seeds: tuple[int | None, ...]
    batch_sizes: tuple[int | None, ...]
    num_trajectories: int
    num_unscored: int
    best: Answer | None
    worst_score: float | None
    elapsed_sec: float
    generation_sec: float
    reward_sec: float
    tokens_generated: int | None
    tokens_scored: int | None
    peak_memory_bytes: int | None
    generator_params: int | None
    reward_params: int | None
    skipped: str | None
    merged: bool

    @property
    def num_objects(self) -> int:
        return len(self.process_seeds)


def shown(text: object, limit: int = 80) -> str:
    """Text for a message: one line, printable on any terminal, not too long."""
    line = str(text).encode("unicode_escape").decode("ascii")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: object) -> float | None:
    """The value as a finite float, or None (also for integers beyond float64)."""
    if not is_number(value):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_bytes(path: Path) -> bytes:
    """The file's bytes; a folder, a pipe, a huge or an empty file is refused before it is read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadFile(f"{shown(path.name)}: not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            size = f"{status.st_size} bytes, over the limit of {MAX_FILE_BYTES}"
            raise BadFile(f"{shown(path.name)}: {size}")
        data = path.read_bytes()
    except OSError as error:
        raise BadFile(f"{shown(path.name)}: can't be read ({error.strerror or error})") from error
    if not data.strip(b" \t\r\n\0"):
        raise BadFile(f"{shown(path.name)}: empty")
    return data


def parse_json(data: bytes, name: str) -> tuple[Any, int]:
    """The value, and how many NaN or Infinity literals it holds (scores of the paper's files)."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise BadFile(f"{shown(name)}: more than {MAX_VALUES} values")
    literals: list[str] = []

    def number(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):  # 1e999 reads as infinity
            literals.append(literal)
        return value

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=number, parse_float=number)
    except RecursionError as error:
        raise BadFile(f"{shown(name)}: nested too deeply") from error
    except ValueError as error:  # JSON and UTF-8 errors, and integers of thousands of digits
        raise BadFile(f"{shown(name)}: not valid JSON ({shown(error)})") from error
    return value, len(literals)


def load_json(path: Path) -> Any:
    """A strict JSON file: NaN and Infinity are refused."""
    value, num_literals = parse_json(read_bytes(path), path.name)
    if num_literals:
        raise BadFile(f"{shown(path.name)}: NaN or Infinity, which JSON does not have")
    return value


def load_objects(path: Path) -> list[dict[str, Any]]:
    """The checked list of objects, one a process, in rank order."""
    name = path.name
    objects, num_literals = parse_json(read_bytes(path), name)
    if not isinstance(objects, list) or not objects:
        raise BadFile(f"{shown(name)}: want a list of one object a process, got {_kind(objects)}")
    for index, item in enumerate(objects):
        if not isinstance(item, dict):
            raise BadFile(f"{shown(name)}: object {index} is {_kind(item)}")
        try:
            _check_object(item)
        except ValueError as error:
            raise BadFile(f"{shown(name)}: object {index}: {error}") from error
    scores = [row.get("score") for item in objects for row in item["trajectories"]]
    unscored = sum(isinstance(score, float) and not math.isfinite(score) for score in scores)
    if num_literals > unscored:
        raise BadFile(f"{shown(name)}: NaN or Infinity elsewhere than in a score")
    return objects


def read_prompt(path: Path) -> PromptResult:
    """Reads, checks and sums up one file."""
    return summarise(path, load_objects(path))


def summarise(path: Path, objects: list[dict[str, Any]]) -> PromptResult:
    """The summary of checked objects."""
    name = shown(path.name)
    json_idx, prompt = _prompt_of(path, objects)
    settings = settings_of(objects[0])
    for index, item in enumerate(objects[1:], start=1):
        if differing := differences(settings, settings_of(item)):
            raise BadFile(f"{name}: objects 0 and {index} differ in {', '.join(differing)}")
    seeds = process_seeds(objects)
    known = [seed for seed in seeds if seed is not None]
    if len(set(known)) < len(known):
        raise BadFile(f"{name}: one process seed stands twice: {known[:16]}")
    answers = list(answers_of(objects))
    slowest = max(objects, key=lambda item: item["elapsed_sec"])
    plan = objects[0].get("plan")
    plan = plan if isinstance(plan, dict) else {}
    skipped = [item["skipped"] for item in objects if item.get("skipped")]
    num_trajectories = sum(len(item["trajectories"]) for item in objects)
    return PromptResult(
        path=path,
        json_idx=json_idx,
        prompt=prompt,
        settings=settings,
        seed=objects[0].get("seed"),
        process_seeds=seeds,
        batch_sizes=tuple(item.get("batch_size") for item in objects),
        num_trajectories=num_trajectories,
        num_unscored=num_trajectories - len(answers),
        # max() keeps the first of equals: lower rank, then lower candidate index.
        best=max(answers, key=lambda answer: answer.score, default=None),
        worst_score=min((answer.score for answer in answers), default=None),
        elapsed_sec=float(slowest["elapsed_sec"]),
        generation_sec=phase_seconds(slowest, "generation"),
        reward_sec=phase_seconds(slowest, "reward"),
        tokens_generated=_total(objects, "tokens_generated"),
        tokens_scored=_total(objects, "tokens_scored"),
        peak_memory_bytes=max(filter(None, _all(objects, "peak_memory_bytes")), default=None),
        generator_params=count_of(plan.get("generator_params")),
        reward_params=count_of(plan.get("reward_params")),
        skipped=str(skipped[0]) if skipped else None,
        merged=any("merged_from" in item for item in objects),
    )


def answers_of(objects: list[dict[str, Any]]) -> Iterator[Answer]:
    """Those with a finite score up to MAX_SCORE: by rank, then candidate index (or place)."""
    for object_index, item in enumerate(objects):
        rows = []
        for position, row in enumerate(item["trajectories"]):
            score = finite(row["score"])
            if score is not None and abs(score) <= MAX_SCORE:
                candidate = row.get("candidate", position)
                rows.append(Answer(row["output"], score, object_index, candidate))
        yield from sorted(rows, key=lambda answer: answer.candidate)


def phase_seconds(item: dict[str, Any], prefix: str) -> float:
    """Seconds of the phases whose name begins with `prefix` ("generation" or "reward")."""
    clock = item.get("clock") or []
    return sum(float(seconds) for phase, seconds in clock if phase.startswith(prefix))


def process_seeds(objects: list[dict[str, Any]]) -> tuple[int | None, ...]:
    """Each object's process seed; where it lacks one, seed + rank among objects of that seed."""
    ranks: Counter[int] = Counter()
    seeds: list[int | None] = []
    for item in objects:
        own, seed = item.get("process_seed"), item.get("seed")
        seeds.append(own if own is not None else None if seed is None else seed + ranks[seed])
        if seed is not None:
            ranks[seed] += 1
    return tuple(seeds)


def settings_of(item: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as far as the object holds them."""
    return {key: value for key, value in item.items() if key in SETTINGS}


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """`name (a against b)` for every setting that differs and matters; a missing one is None."""
    names = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    names = [key for key in names if key not in NOT_COMPARED]
    return [f"{shown(k)} ({shown(left.get(k))} against {shown(right.get(k))})" for k in names]


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    if value is None or value == []:
        return "null" if value is None else "an empty list"
    return kinds.get(type(value), "a number")


def _check_object(item: dict[str, Any]) -> None:
    _check_names(item)
    rows = item.get("trajectories")
    if not isinstance(rows, list):
        raise ValueError(f"trajectories: want a list, got {_kind(rows)}")
    for position, row in enumerate(rows):
        _check_trajectory(row, position)
    elapsed = finite(item.get("elapsed_sec"))
    if elapsed is None or not 0 <= elapsed <= MAX_SECONDS:
        raise ValueError(f"elapsed_sec: want seconds, got {shown(item.get('elapsed_sec'))}")
    clock = item.get("clock")
    if clock is not None and not isinstance(clock, list):
        raise ValueError(f"clock: want a list, got {_kind(clock)}")
    for entry in clock or []:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(f"clock: want [phase, seconds], got {shown(entry)}")
        if (seconds := finite(entry[1])) is None or not 0 <= seconds <= MAX_SECONDS:
            raise ValueError(f"clock: want seconds for {shown(entry[0])}, got {shown(entry[1])}")
    for key in ("tokens_generated", "tokens_scored", "peak_memory_bytes"):
        if item.get(key) is not None and count_of(item[key]) is None:
            raise ValueError(f"{key}: want a count, got {shown(item[key])}")


def _check_names(item: dict[str, Any]) -> None:
    for key in ("llm_name", "reward_model_name"):
        value = item.get(key)
        if value is not None and not (isinstance(value, str) and is_name(value)):
            raise ValueError(f"{key}: want a model's name, got {shown(value)}")
    for key in ("seed", "process_seed", "batch_size"):
        value = item.get(key)
        if value is not None and not (is_number(value) and count_of(abs(value)) is not None):
            raise ValueError(f"{key}: want a whole number, got {shown(value)}")
    if item.get("batch_size") is not None and item["batch_size"] < 1:
        raise ValueError(f"batch_size: want 1 or more, got {item['batch_size']}")
    for key in ("speculative_rejection", "refill"):
        if item.get(key) is not None and not isinstance(item[key], bool):
            raise ValueError(f"{key}: want true or false, got {shown(item[key])}")
    for key in ("alpha", "keep_fraction"):
        value, number = item.get(key), finite(item.get(key))
        if value not in (None, "auto") and (number is None or not 0 <= number <= 1):
            raise ValueError(f"{key}: want a fraction, got {shown(value)}")
    if item.get("skipped") is not None and not isinstance(item["skipped"], str | bool):
        raise ValueError(f"skipped: want the reason, got {_kind(item['skipped'])}")


def _check_trajectory(row: object, position: int) -> None:
    where = f"trajectory {position}"
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {_kind(row)}")
    if not isinstance(row.get("output"), str):
        raise ValueError(f"{where}: output: want a string, got {_kind(row.get('output'))}")
    if "score" not in row or not (row["score"] is None or is_number(row["score"])):
        raise ValueError(f"{where}: score: want a number, got {_kind(row.get('score'))}")
    if row.get("prompt") is not None and not isinstance(row["prompt"], str):
        raise ValueError(f"{where}: prompt: want a string, got {_kind(row['prompt'])}")
    if "candidate" in row and count_of(row["candidate"]) is None:
        raise ValueError(f"{where}: candidate: want an index, got {shown(row['candidate'])}")


def _prompt_of(path: Path, objects: list[dict[str, Any]]) -> tuple[int, str | None]:
    """JSON_idx and raw prompt text: by the record, else by file name and trajectories."""
    name = shown(path.name)
    number = path.stem.rpartition("_prompt_")[2]
    named = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else None
    found = {_record_of(item, name) for item in objects}
    indices = {idx for idx, _ in [*found, (named, None)] if idx is not None}
    prompts = {text for _, text in found if text is not None}
    if len(indices) != 1:
        raise BadFile(f"{name}: want one JSON_idx, got {sorted(indices)}")
    if len(prompts) > 1:
        raise BadFile(f"{name}: its objects have different prompts")
    return indices.pop(), prompts.pop() if prompts else None


def _record_of(item: dict[str, Any], name: str) -> tuple[int | None, str | None]:
    record = item.get("prompt")
    if isinstance(record, dict):
        idx, text = record.get("JSON_idx"), record.get("prompt")
        if idx is not None and count_of(idx) is None:
            raise BadFile(f"{name}: JSON_idx: want a whole number of 0 or more, got {shown(idx)}")
        if not isinstance(text, str):
            raise BadFile(f"{name}: prompt: want a string, got {_kind(text)}")
        return idx, text
    if record is not None and not isinstance(record, str):
        raise BadFile(f"{name}: prompt: want a record or a string, got {_kind(record)}")
    rows = item["trajectories"]
    return None, record if record is not None else rows[0].get("prompt") if rows else None


def count_of(value: object) -> int | None:
    """A whole number of 0 or more that fits 64 bits, else None."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < 2**63 else None  # type: ignore[operator,return-value]


def _all(objects: list[dict[str, Any]], key: str) -> list[int | None]:
    return [count_of(item.get(key)) for item in objects]


def _total(objects: list[dict[str, Any]], key: str) -> int | None:
    """The sum over objects, or None when one of them does not say."""
    values = _all(objects, key)
    return None if None in values else sum(values)  # type: ignore[arg-type]


def is_name(text: str) -> bool:
    """One printable line of a sane length."""
    return text.isprintable() and 0 < len(text.strip()) <= len(text) <= MAX_NAME_CHARS
