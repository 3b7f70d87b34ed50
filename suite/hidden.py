"""The hidden states of a run, beside its JSON files: what value heads are fitted from.

One file a prompt and object of the JSON list, `<name of the JSON file>.hidden.<n>.safetensors`: of
every text that was scored its candidate, round, length in answer tokens, whether it was finished,
its score, and the reward model's last hidden state as float16. It is written before the JSON, so a
prompt that is done has its states. Numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rewards.value_head import HIDDEN_DTYPE
from suite.files import write_whole

FORMAT = "speculative-rejection-hidden-1"
COLUMNS = {
    "candidate": np.int32,
    "round": np.int32,
    "length": np.int32,
    "finished": np.uint8,
    "score": np.float32,
    "hidden": HIDDEN_DTYPE,
}


class BadStates(ValueError):
    """A file of hidden states that can't be used; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class States:
    """Scored texts, one an entry: `hidden [n, size]`, all others `[n]`."""

    candidate: np.ndarray
    round: np.ndarray
    length: np.ndarray
    finished: np.ndarray
    score: np.ndarray
    hidden: np.ndarray
    names: dict[str, str] = field(default_factory=dict)  # whose states, where read from a file

    def __len__(self) -> int:
        return len(self.candidate)


def join(parts: Iterable[States], hidden_size: int) -> States:
    """One `States` of many."""
    parts = list(parts)
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]).astype(dtype)
        if parts
        else np.zeros((0, hidden_size) if name == "hidden" else 0, dtype)
        for name, dtype in COLUMNS.items()
    }
    return States(**columns)


def states_path(json_path: Path, number: int) -> Path:
    """The file of the JSON's object `number`."""
    return json_path.with_name(f"{json_path.stem}.hidden.{number}.safetensors")


def write_states(path: Path, states: States, names: dict[str, str]) -> None:
    """Appears whole or not at all; `names` says whose states they are."""
    from safetensors.numpy import save

    columns = {name: np.ascontiguousarray(getattr(states, name)) for name in COLUMNS}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(columns, {"format": FORMAT, **names}))


def read_states(path: Path) -> States:
    """Raises BadStates."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            found = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # Besides its own error the library raises what numpy does for a kind of number it lacks.
    except (OSError, SafetensorError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise BadStates(f"{path.name}: can't be read ({str(error)[:200]})") from error
    if found.get("format") != FORMAT or set(columns) != set(COLUMNS):
        raise BadStates(f"{path.name}: not a file of hidden states")
    if any(column.dtype != COLUMNS[name] for name, column in columns.items()):
        raise BadStates(f"{path.name}: its columns are of other kinds of numbers")
    if columns["candidate"].ndim != 1:
        raise BadStates(f"{path.name}: its columns differ in length")
    number = len(columns["candidate"])
    flat = all(columns[name].shape == (number,) for name in COLUMNS if name != "hidden")
    if not flat or columns["hidden"].ndim != 2 or len(columns["hidden"]) != number:
        raise BadStates(f"{path.name}: its columns differ in length")
    return States(**columns, names=found)
