"""Prompt files: a JSON list, JSONL, or a data set id becomes a list of `Prompt`.

Every mistake in a file is found before a model loads and named with its place. A prompt that is
there but empty is no mistake of the file: it carries its `skip` reason and the run goes on. The one
invariant: no two prompts of a list share a `JSON_idx`, since it names the file of the answers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from suite.settings import PROJECT

LARGEST_FILE_BYTES = 512 * 2**20
LARGEST_INDEX = 10**12  # far above any data set; keeps file names short


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One instruction; `record` is its whole entry in the file, `skip` says why it can't be run."""

    json_idx: int
    prompt: str
    record: dict[str, Any]
    skip: str | None = None


def load_prompts(
    name: str, num_prompts: int | None = None, local_files_only: bool = False
) -> list[Prompt]:
    """The prompts of a file (looked for in the working folder, then the project) or data set."""
    path = _find(name)
    if path is not None:
        entries = _read_file(path)
        where = str(path)
    else:
        entries = _read_data_set(name, local_files_only)
        where = f"data set {name}"
    return _checked(entries, where, num_prompts)


def _find(name: str) -> Path | None:
    for path in (Path(name), PROJECT / name):
        if path.is_dir():
            raise ValueError(f"--data_filename {name} is a folder; give a file inside it")
        if path.exists():
            return path
    if re.search(r"\.jsonl?$", name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise FileNotFoundError(
            f"--data_filename {name} does not exist, here or in the project; give a JSON or JSONL "
            "file, or a data set's id"
        )
    return None


def _read_file(path: Path) -> list[Any]:
    size = path.stat().st_size
    if size > LARGEST_FILE_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, more than the {LARGEST_FILE_BYTES:,} that a prompt file "
            "may have; split it"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e.reason} at byte {e.start})") from e
    if not text.strip():
        raise ValueError(f"{path} is empty; it must hold a JSON list of {{JSON_idx, prompt}}")
    if path.suffix.lower() == ".jsonl":
        return list(_json_lines(text, path))
    try:
        entries = _json(text)
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}; JSONL files end in .jsonl") from e
    if not isinstance(entries, list):
        raise ValueError(
            f"{path} must hold a JSON list of {{JSON_idx, prompt}}, got {_kind(entries)}"
        )
    return entries


def _json_lines(text: str, path: Path) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield _json(line)
            except ValueError as e:
                raise ValueError(f"{path}, line {number}, is not JSON: {e}") from e


def _json(text: str) -> Any:
    """Strict JSON: NaN and Infinity could not be written again with the answers."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant[:40]} is no number of JSON")

    def finite(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def _read_data_set(name: str, local_files_only: bool) -> Iterable[Any]:
    import datasets

    if local_files_only:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        loaded = datasets.load_dataset(name)
    except Exception as e:  # the library raises a dozen kinds, all of them the user's to mend
        raise ValueError(
            f"--data_filename {name} is no file here, and datasets.load_dataset could not load it "
            f"as a data set: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        ) from e
    if isinstance(loaded, dict):
        split = next((s for s in ("test", "eval", "validation", "train") if s in loaded), None)
        loaded = loaded[split or next(iter(loaded))]
    columns = loaded.column_names
    source = next((c for c in ("prompt", "instruction", "question") if c in columns), None)
    if source is None:
        raise ValueError(f"data set {name} must have a column prompt, got {columns}")
    return (_plain({**row, "prompt": row[source]}) for row in loaded)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a data set may hold images or dates; JSON keeps what it can say."""
    try:
        return _json(json.dumps(row))
    except (TypeError, ValueError):
        return {key: row[key] for key in ("JSON_idx", "prompt") if key in row}


def _checked(entries: Iterable[Any], where: str, num_prompts: int | None) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: dict[int, int] = {}
    for place, entry in enumerate(entries):
        prompt = _one(entry, place, f"{where}, entry {place}")
        if prompt.json_idx in seen:
            raise ValueError(
                f"{where}, entry {place}: JSON_idx {prompt.json_idx} stands at entry "
                f"{seen[prompt.json_idx]} already; every prompt needs its own (entries without "
                "one get their position)"
            )
        seen[prompt.json_idx] = place
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{where} holds no prompt; it must be a list of {{JSON_idx, prompt}}")
    return prompts[:num_prompts]


def _one(entry: Any, place: int, where: str) -> Prompt:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object {{JSON_idx, prompt}}, got {_kind(entry)}")
    if "prompt" not in entry:
        raise ValueError(f"{where} lacks prompt; it has {sorted(map(str, entry))}")
    text = entry["prompt"]
    if not isinstance(text, str):
        raise ValueError(f"{where}: prompt must be a text, got {_kind(text)}")
    json_idx = entry.get("JSON_idx", place)
    if isinstance(json_idx, str) and re.fullmatch(r"[0-9]{1,12}", json_idx):
        json_idx = int(json_idx)
    if type(json_idx) is not int or not 0 <= json_idx <= LARGEST_INDEX:
        raise ValueError(
            f"{where}: JSON_idx must be an integer from 0 to {LARGEST_INDEX}, got "
            f"{_kind(json_idx)} {str(json_idx)[:40]}; leave it out to use the position"
        )
    record = {**entry, "JSON_idx": json_idx}
    return Prompt(json_idx, text, record, _reason_to_skip(text))


def _reason_to_skip(text: str) -> str | None:
    if not text.strip():
        return "the prompt is empty"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "the prompt holds half of a surrogate pair, which is no text"
    return None


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "null",
    }
    return names.get(type(value), "a number")
