"""Mutated logs: hidden states, logged pools and lines of the experiment, through their readers."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiment_accounts import seconds, tokens
from benchmarks.experiment_export import export
from benchmarks.experiment_lines import Archive
from benchmarks.experiment_plan import FILES, Size
from benchmarks.experiment_report import Report
from benchmarks.experiment_whole import ROUND_FIELDS
from postprocess import replay
from suite.hidden import COLUMNS, BadStates, read_states
from suite.settings import Settings
from tests.mutation import each_reader, encode, mutate_bytes, mutate_value, mutated
from tests.test_replay import log_pool


@pytest.fixture(scope="module")
def pool_folder(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Best-of-8 of one prompt with partial scores and hidden states."""
    return log_pool(
        tiny_models, tmp_path_factory.mktemp("pool") / "Bo8", ("Why?",),
        batch_size=8, log_partial="8,16", max_gen_tokens=24, save_token_ids=False,
    )  # fmt: skip


@each_reader
def test_hidden_state_files(pool_folder: Path, tmp_path: Path, num_files: int) -> None:
    rng, path, read = random.Random(10), tmp_path / "x.safetensors", 0
    (whole,) = (file.read_bytes() for file in pool_folder.glob("*.safetensors"))
    head = 8 + int.from_bytes(whole[:8], "little")
    for number in range(num_files):
        start, body, action = whole[:head], whole[head:], rng.random()
        if action < 0.5:
            changed = encode(mutate_value(json.loads(start[8:]), rng))
            start = len(changed).to_bytes(8, "little") + changed
        elif action < 0.75:
            start = mutate_bytes(start, rng)
        else:
            place = rng.randrange(len(body))
            body = body[:place] + rng.randbytes(4) + body[place + 4 :]
        path.write_bytes(start + body)
        try:
            states = read_states(path)
        except BadStates as error:
            assert "x.safetensors" in str(error) and len(str(error)) < 2000, number
            continue
        read += 1
        for name, dtype in COLUMNS.items():
            column = getattr(states, name)
            assert column.dtype == dtype and len(column) == len(states), number
        assert states.hidden.ndim == 2, number
    assert num_files / 10 < read < num_files * 9 / 10


@each_reader
def test_logged_pools(
    pool_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, num_files: int
) -> None:
    """Spoiled logs through replay.py: a table without a NaN, or a message and a code."""
    rng, codes = random.Random(12), Counter()
    (record,) = pool_folder.glob("*.json")
    whole, path = json.loads(record.read_text()), tmp_path / "Bo8" / record.name
    path.parent.mkdir()
    for number in range(num_files):
        path.write_bytes(mutated(whole, rng))
        code = replay.main([str(path.parent), "--schedule", "fixed:8"])
        out = capsys.readouterr().out.lower()
        assert code in (0, 1, 2) and "nan" not in out and "inf" not in out, number
        codes[code] += 1
    assert codes[0] > num_files / 20 and codes[0] < num_files * 19 / 20


def experiment_lines() -> list[dict[str, Any]]:
    costs = {"elapsed_sec": 2.5, "generation_sec": 1.0, "reward_sec": 1.0, "capture_sec": 0.0}
    counts = {
        "tokens_generated": 30,
        "tokens_scored": 40,
        "num_prompt_tokens": 5,
        "num_failed_rows": 0,
    }
    best = {"process_seed": 0, "candidate": 1, "score": 2.0, "num_tokens": 9, "output": "text"}
    line = {"JSON_idx": 1, **costs, **counts, "best": best}
    winners = [{"place": 0, "process_seed": 0, "candidate": 0, "output": "t"}]
    rounds = [{name: 8 for name in ROUND_FIELDS} | {"partial": [2, None]}]
    return [
        {**line, "config": "pool", "scores": [1.0, 2.0, 0.5], "num_tokens": [9, 9, 12],
         "winners": winners, "process_seeds": [0]},
        {**line, "config": "alpha 0.5 seed 0", "scores": [2.0], "rounds": rounds, "start_rows": 4,
         "num_completed": 2},
        {**line, "config": "wave seed 0"},
        {**line, "config": "partial", "partials": {"8": [3, 0.5], "16": [0, None]}},
        {"JSON_idx": 2, "config": "pool", "failed": "a reason"},
    ]  # fmt: skip


def key_of(spoiled: bytes) -> tuple[Any, Any] | None:
    try:
        line = json.loads(spoiled)
    except ValueError:
        return None
    return (line.get("JSON_idx"), line.get("config")) if isinstance(line, dict) else None


@each_reader
def test_experiment_lines(tmp_path: Path, num_files: int) -> None:
    """A spoiled line is not read, and what it stood for is done again; the others count. Whatever
    is read makes a report, and an export of the prompts in it, without a NaN."""
    rng, read, exported = random.Random(13), 0, 0
    size = dataclasses.asdict(Size(pool=3, block=3, fit_rows=1, alphas=(0.5,), seeds=(0,)))
    kept = dataclasses.asdict(Settings(max_gen_tokens=12)) | size
    (tmp_path / "settings.json").write_text(json.dumps(kept))
    prompts = tmp_path / "prompts_of_all.json"
    prompts.write_text(json.dumps([{"JSON_idx": i, "prompt": "Why?"} for i in range(9)]))
    lines = [encode(line) for line in experiment_lines()]
    wanted = {(line["JSON_idx"], line["config"]): line for line in experiment_lines()}
    for number in range(num_files):
        place = rng.randrange(len(lines))
        spoiled = mutated(experiment_lines()[place], rng)
        text = b"\n".join([*lines[:place], spoiled, *lines[place + 1 :]]) + b"\n"
        (tmp_path / f"{FILES[0]}.jsonl").write_bytes(text)
        archive = Archive(tmp_path)
        done = archive.done
        others = [key for at, key in enumerate(wanted) if at != place]
        twin = key_of(spoiled)  # a spoiled line may have taken another's place
        assert all(done[key] == wanted[key] for key in others if key != twin), number
        for line in done.values():
            if "failed" in line:
                continue
            assert math.isfinite(seconds(line)) and tokens(line) >= 0, number
            assert math.isfinite(line["best"]["score"]), number
        report = Report(archive)
        assert not re.search(r"\b(nan|inf)\b", report.text()), number
        if [prompt["pool"]["JSON_idx"] for prompt in report.main] == [1]:
            folders = export(report, tmp_path / "export", str(prompts))
            exported += all(any(folder.glob("*.json")) for folder in folders) and len(folders) > 1
            shutil.rmtree(tmp_path / "export")
        read += len(done) == len(lines)
    assert num_files / 20 < read < num_files * 19 / 20
    assert exported > num_files / 20
