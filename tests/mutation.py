"""Mutated JSON and bytes for the fuzz tests: fixed seeds, so that a failure repeats."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import pytest

JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**70, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324),
    *(math.nan, math.inf, -math.inf, "", "x", "NaN", "1", "../../x", "a\0b", "\ud800", "é" * 300),
    *([], [[]], [1], ["x"], [None], {}, {"score": 1}, {"JSON_idx": 1}, [["generation", 1]]),
    *([["x", -1]], [{"output": "y", "score": 9}], list(range(50)), "auto", "SmolLM2", "x" * 5000),
]
SNIPPETS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"null",
    b"NaN",
    b"-",
    b"1e999",
    b"\xff",
    b"\0",
]


def nodes(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of everything inside a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(inner for key, item in items for inner in nodes(item, (*path, key)))]


def mutate_value(value: Any, rng: random.Random) -> Any:
    """One to three replacements, removals or repetitions somewhere inside."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(nodes(value))
        if not path:
            return rng.choice(JUNK)
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        action = rng.random()
        if action < 0.6:
            parent[path[-1]] = copy.deepcopy(rng.choice(JUNK))
        elif action < 0.8 and isinstance(parent, dict):
            del parent[path[-1]]
        elif isinstance(parent, list):
            if rng.random() < 0.5:
                parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
            else:
                del parent[path[-1]]
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Truncations, flips, removals, insertions and repetitions."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not made:
            break
        start = rng.randrange(len(made))
        end = min(len(made), start + rng.choice((1, 1, 4, 40)))
        action = rng.randrange(6)
        if action == 0:
            del made[start:]
        elif action == 1:
            made[start] ^= 1 << rng.randrange(8)
        elif action == 2:
            del made[start:end]
        elif action == 3:
            made[start:start] = rng.choice(SNIPPETS)
        elif action == 4:
            made[start:start] = made[start:end]
        else:
            made[start:end] = rng.choice(SNIPPETS)
    return bytes(made)


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def mutated(value: Any, rng: random.Random) -> bytes:
    if rng.random() < 0.6:
        return encode(mutate_value(value, rng))
    return mutate_bytes(encode(value), rng)


each_reader = pytest.mark.parametrize(
    "num_files", [300, pytest.param(10_000, marks=pytest.mark.long)]
)
