"""Spoiled prompt files and run folders: read, resumed or refused by name."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from suite.prompts import load_prompts
from suite.records import FolderRefused
from tests.test_records import objects, opened, prompts

ODD = (None, True, -1, 10**30, 1.5, float("nan"), "", "\ud800", "../../x", "\0", [], {}, [[]])


def spoiled(value: Any, rng: random.Random) -> bytes:
    """JSON of `value` with a few places changed, and now and then with bytes changed or cut off."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places, inner = [], value
        while isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            places.append((inner, key))
            inner = inner[key]
        if places and rng.random() < 0.25:
            del places[-1][0][places[-1][1]]
        elif places:
            places[-1][0][places[-1][1]] = copy.deepcopy(rng.choice(ODD))
    data = bytearray(json.dumps(value).encode())
    if rng.random() < 0.15:
        del data[rng.randrange(len(data)) :]
    elif rng.random() < 0.15:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def test_spoiled_prompt_files_are_read_or_named(tmp_path: Path) -> None:
    rng, outcomes = random.Random(9), [0, 0]
    entries = [{"JSON_idx": i, "prompt": f"p{i}", "more": {"x": [1]}} for i in range(4)]
    for _ in range(1500):
        (tmp_path / "p.json").write_bytes(spoiled(entries, rng))
        try:
            read = load_prompts(str(tmp_path / "p.json"))
        except ValueError as error:
            assert "p.json" in str(error)
            outcomes[0] += 1
        else:
            assert len({p.json_idx for p in read}) == len(read)
            assert all(type(p.json_idx) is int and 0 <= p.json_idx <= 10**12 for p in read)
            outcomes[1] += 1
    assert min(outcomes) > 100


def test_spoiled_folders_resume_or_are_refused(tmp_path: Path) -> None:
    """Records, notes and failures at once: what counts as done is whole and of these settings."""
    rng, some, outcomes = random.Random(9), prompts(3), [0, 0]
    note = {"file": "", "size": 3, "mtime_ns": 4, "prompt": "a", "run": "b"}
    failure = {"JSON_idx": 1, "prompt": "a", "reason": "b"}
    for _ in range(300):
        with opened(tmp_path) as run:
            for prompt in some:
                content = objects(prompt)
                whole = json.dumps(content).encode()
                spoils = rng.random() < 0.5
                run.path(prompt.json_idx).write_bytes(spoiled(content, rng) if spoils else whole)
            (tmp_path / ".finished.0.jsonl").write_bytes(spoiled(note, rng) + b"\n")
            (tmp_path / "failures.jsonl").write_bytes(spoiled(failure, rng) + b"\n")
            run.failures()
            try:
                done = run.finished(some)
            except FolderRefused:
                outcomes[0] += 1
                continue
            outcomes[1] += 1
            for index in done:
                (made,) = json.loads(run.path(index).read_bytes())
                assert made["prompt"]["JSON_idx"] == index and made["batch_size"] == 2
                assert made["prompt"]["prompt"] == f"p{index}"
    assert min(outcomes) > 30
