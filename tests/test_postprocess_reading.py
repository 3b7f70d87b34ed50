"""One prompt's file: what is read, what is refused and under which name."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from postprocess import reading
from postprocess.reading import BadFile, differences, load_json, read_prompt, shown
from tests.postprocess_archive import LLM, REWARD, make_object, speculative


def write(folder: Path, value: Any, name: str = f"{LLM}_{REWARD}_prompt_0001.json") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_summary_over_processes(tmp_path: Path) -> None:
    """Seconds of the slowest process with its phases, tokens added up, the larger peak."""
    objects = [
        make_object(1, [0, 1, 2, 3], 10, tokens=(5, 6)),
        make_object(1, [1, 1, 2, 4], 12, rank=1, tokens=(7, 8)),
    ]
    result = read_prompt(write(tmp_path, objects))
    assert (result.json_idx, result.prompt) == (1, "Name a colour.")
    assert result.num_objects == 2
    assert result.process_seeds == (0, 1)
    assert result.elapsed_sec == 12
    assert (result.generation_sec, result.reward_sec) == (6, 3)
    assert (result.tokens_generated, result.tokens_scored) == (12, 14)
    assert result.peak_memory_bytes == 2 * 2**30
    assert result.best is not None
    assert (result.best.score, result.best.output) == (4, "answer 1.3")
    assert result.worst_score == 0


def test_tie_goes_to_lower_rank_then_lower_candidate(tmp_path: Path) -> None:
    first = make_object(1, [2, 5, 5], 1)
    first["trajectories"].reverse()  # the order in the list must not matter
    second = make_object(1, [5, 0, 0], 1, rank=1)
    result = read_prompt(write(tmp_path, [first, second]))
    assert result.best is not None
    assert (result.best.object_index, result.best.candidate) == (0, 1)


def paper_object(scores: list[float], elapsed: float, **fields: Any) -> dict[str, Any]:
    """As the paper's repository writes it: arguments, `clock`, trajectories, nothing of ours."""
    return {
        "output_folder": "./archive/x",
        "llm_name": LLM,
        "reward_model_name": REWARD,
        "batch_size": 120,
        "max_tokens": 8000,
        "seed": 0,
        "speculative_rejection": False,
        "alpha": 0.5,
        "clock": [["tokenization", 0.5], ["generation pass", 2.0], ["reward pass", 1.0]],
        "elapsed_sec": elapsed,
        "trajectories": [
            {"prompt": "Why?", "output": f"because {place}", "score": score}
            for place, score in enumerate(scores)
        ],
        **fields,
    }


def test_paper_file_without_our_fields(tmp_path: Path) -> None:
    """No record, process seeds or tokens: index by file name, prompt by trajectories."""
    objects = [paper_object([1, 2], 4), paper_object([3, 2], 5)]
    result = read_prompt(write(tmp_path, objects, "some_prompt_0042.json"))
    assert (result.json_idx, result.prompt) == (42, "Why?")
    assert result.process_seeds == (0, 1)
    assert result.tokens_generated is None
    assert (result.elapsed_sec, result.generation_sec, result.reward_sec) == (5, 2, 1)
    assert result.best is not None
    assert result.best.output == "because 0"


def test_duplicated_trajectories_do_not_move_the_extremes(tmp_path: Path) -> None:
    """Fault 18: the paper's files may hold a finished row once a round."""
    once = read_prompt(write(tmp_path, [paper_object([1, 2, 3], 4)], "a_prompt_0001.json"))
    twice = read_prompt(
        write(tmp_path, [paper_object([1, 2, 3, 3, 3, 1], 4)], "b_prompt_0001.json")
    )
    assert once.best is not None and twice.best is not None
    assert (once.best.score, once.worst_score) == (twice.best.score, twice.worst_score)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "null", "1e200"])
def test_score_that_is_no_number_cannot_win(tmp_path: Path, literal: str) -> None:
    """Fault 6: the trajectory is ignored and counted; the others stand."""
    text = json.dumps([paper_object([1, 777, 3], 4)]).replace("777", literal)
    result = read_prompt(write(tmp_path, text))
    assert result.num_unscored == 1
    assert result.best is not None
    assert (result.best.score, result.worst_score) == (3, 1)


def test_huge_integer_score_is_no_score(tmp_path: Path) -> None:
    text = json.dumps([paper_object([1, 777], 4)]).replace("777", "9" * 400)
    assert read_prompt(write(tmp_path, text)).num_unscored == 1


def mutated(**fields: Any) -> list[dict[str, Any]]:
    return [{**make_object(1, [1, 2], 3), **fields}]


BAD: list[tuple[str, Any]] = [
    ("empty", ""),
    ("empty", "\0\0\0\0"),
    ("not valid JSON", "[{"),
    ("not valid JSON", '[{"a": 1}'),
    ("nested too deeply", "[" * 100_000),
    ("nested too deeply", '[{"a":' * 50_000),
    ("not valid JSON", "[" + "9" * 5000 + "]"),
    ("want a list", {"trajectories": []}),
    ("an empty list", []),
    ("object 0 is a number", [3]),
    ("object 1 is null", [make_object(1, [1], 1), None]),
    ("trajectories: want a list, got null", mutated(trajectories=None)),
    ("trajectory 0 is a string", mutated(trajectories=["x"])),
    ("output: want a string, got null", mutated(trajectories=[{"score": 1}])),
    ("score: want a number, got a string", mutated(trajectories=[{"output": "x", "score": "1"}])),
    ("score: want a number, got true", mutated(trajectories=[{"output": "x", "score": True}])),
    ("score: want a number, got null", mutated(trajectories=[{"output": "x"}])),
    ("candidate", mutated(trajectories=[{"output": "x", "score": 1, "candidate": -1}])),
    ("elapsed_sec", mutated(elapsed_sec="3")),
    ("elapsed_sec", mutated(elapsed_sec=-1)),
    ("elapsed_sec", mutated(elapsed_sec=1e300)),
    ("clock: want a list", mutated(clock={"generation": 1})),
    ("clock: want [phase, seconds]", mutated(clock=[["generation"]])),
    ("clock: want seconds", mutated(clock=[["generation", "x"]])),
    ("tokens_generated", mutated(tokens_generated=1.5)),
    ("tokens_scored", mutated(tokens_scored=-5)),
    ("llm_name", mutated(llm_name=["x"])),
    ("reward_model_name", mutated(reward_model_name="a\nb")),
    ("seed", mutated(seed=0.5)),
    ("batch_size", mutated(batch_size=0)),
    ("speculative_rejection", mutated(speculative_rejection="yes")),
    ("alpha", mutated(alpha=2)),
    ("JSON_idx", mutated(prompt={"JSON_idx": "1", "prompt": "x"})),
    ("prompt: want a string", mutated(prompt={"JSON_idx": 1, "prompt": None})),
    ("prompt: want a record", mutated(prompt=5)),
    ("want one JSON_idx, got [1, 2]", mutated(prompt={"JSON_idx": 2, "prompt": "x"})),
    (
        "objects 0 and 1 differ in max_tokens (2048 against 9)",
        [make_object(1, [1], 1), {**make_object(1, [1], 1, rank=1), "max_tokens": 9}],
    ),
    (
        "different prompts",
        [
            make_object(1, [1], 1),
            make_object(1, [1], 1, rank=1, prompt={"JSON_idx": 1, "prompt": "x"}),
        ],
    ),
    ("one process seed stands twice", [make_object(1, [1], 1), make_object(1, [1], 1)]),
]


@pytest.mark.parametrize(("words", "value"), BAD)
def test_fault_is_named_with_its_file(tmp_path: Path, words: str, value: Any) -> None:
    path = write(tmp_path, value)
    with pytest.raises(BadFile) as caught:
        read_prompt(path)
    assert words in str(caught.value)
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "field", ['"elapsed_sec": 3', '"max_tokens": 2048', '"JSON_idx": 1', '"tokens_scored": 200']
)
def test_nan_outside_a_score_is_refused(tmp_path: Path, field: str) -> None:
    text = json.dumps([make_object(1, [1, 2], 3)])
    assert field in text
    with pytest.raises(BadFile):
        read_prompt(write(tmp_path, text.replace(field, field.split(":")[0] + ": NaN")))


def test_nan_in_a_field_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    """JSON is strict: a NaN as a score is the paper's only licence."""
    text = json.dumps([make_object(1, [1, 777], 3, extra=888)])
    assert read_prompt(write(tmp_path, text.replace("777", "NaN"))).num_unscored == 1
    both = text.replace("777", "NaN").replace("888", "NaN")
    with pytest.raises(BadFile, match="elsewhere than in a score"):
        read_prompt(write(tmp_path, both))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x_prompt_0001.json"
    path.write_bytes(b'[{"llm_name": "\xff\xfe"}]')
    with pytest.raises(BadFile, match="not valid JSON"):
        read_prompt(path)


def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [make_object(1, [1, 2], 3)])
    monkeypatch.setattr(reading, "MAX_VALUES", 10)
    with pytest.raises(BadFile, match="more than 10 values"):
        read_prompt(path)
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 100)
    with pytest.raises(BadFile, match="over the limit of 100"):
        read_prompt(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe would block for ever, a folder can't be read."""
    pipe, folder = tmp_path / "a_prompt_0001.json", tmp_path / "b_prompt_0001.json"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(BadFile, match="not a regular file"):
            read_prompt(path)
    with pytest.raises(BadFile, match="can't be read"):
        read_prompt(tmp_path / "gone_prompt_0001.json")


def test_strict_json(tmp_path: Path) -> None:
    assert load_json(write(tmp_path, '{"a": [1.5]}')) == {"a": [1.5]}
    with pytest.raises(BadFile, match="NaN or Infinity"):
        load_json(write(tmp_path, '{"a": Infinity}'))


def test_measurements_are_no_settings(tmp_path: Path) -> None:
    """Prompts differ in what was measured; runs that share a folder differ in nothing else."""
    one = make_object(1, [1], 1, num_prompt_tokens=5, out_of_memory_splits=0, device="cpu")
    two = make_object(1, [1], 2, num_prompt_tokens=9, out_of_memory_splits=3, device="gpu")
    assert differences(reading.settings_of(one), reading.settings_of(two)) == []
    other = {**one, "temperature": 0.5, "model_dir": "/elsewhere", "num_prompts": 3, "seed": 8}
    names = differences(reading.settings_of(one), reading.settings_of(other))
    assert names == ["temperature (None against 0.5)"]


def test_messages_are_one_printable_line() -> None:
    assert shown("a\nb\x1b[31m\ud800é") == "a\\nb\\x1b[31m\\ud800\\xe9"
    assert len(shown("x" * 1000)) == 80


def test_skipped_prompt(tmp_path: Path) -> None:
    item = make_object(1, [], 0.1, skipped="the prompt has 3000 tokens", **speculative(0.5))
    result = read_prompt(write(tmp_path, [item]))
    assert result.skipped == "the prompt has 3000 tokens"
    assert result.best is None
    assert not math.isnan(result.elapsed_sec)
