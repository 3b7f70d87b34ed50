"""Prompt files: what is read, what is refused and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suite.prompts import load_prompts
from suite.settings import PROJECT


def write(folder: Path, content: Any, name: str = "p.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_demo_prompts_are_eight_and_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = load_prompts("prompts/demo.json")
    assert [p.json_idx for p in prompts] == list(range(8))
    assert len({p.prompt for p in prompts}) == 8
    assert all(p.skip is None for p in prompts)


def test_a_file_here_comes_before_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").mkdir()
    write(tmp_path / "prompts", [{"JSON_idx": 5, "prompt": "mine"}], "demo.json")
    assert [p.prompt for p in load_prompts("prompts/demo.json")] == ["mine"]
    assert len(load_prompts(str(PROJECT / "prompts" / "demo.json"))) == 8


def test_other_fields_pass_through_and_positions_fill_in(tmp_path: Path) -> None:
    entries = [{"prompt": "a", "source": "x"}, {"JSON_idx": 7, "prompt": "b"}, {"prompt": "c"}]
    prompts = load_prompts(write(tmp_path, entries))
    assert [p.json_idx for p in prompts] == [0, 7, 2]
    assert prompts[0].record == {"prompt": "a", "source": "x", "JSON_idx": 0}


def test_jsonl_and_num_prompts(tmp_path: Path) -> None:
    text = '{"prompt": "a"}\n\n{"prompt": "b\\u2028c"}\n{"prompt": "d"}\n'
    prompts = load_prompts(write(tmp_path, text, "p.jsonl"), num_prompts=2)
    assert [p.prompt for p in prompts] == ["a", "b\u2028c"]


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([{"prompt": "a"}]).encode())
    assert load_prompts(str(path))[0].prompt == "a"


@pytest.mark.parametrize("text", ["", "  \n\t"])
def test_an_empty_prompt_is_skipped_with_a_reason(tmp_path: Path, text: str) -> None:
    prompts = load_prompts(write(tmp_path, [{"prompt": text}, {"prompt": "b"}]))
    assert prompts[0].skip == "the prompt is empty"
    assert prompts[1].skip is None


def test_half_a_surrogate_pair_is_skipped_with_a_reason(tmp_path: Path) -> None:
    prompts = load_prompts(
        write(tmp_path, '[{"prompt": "a\\ud83d"}, {"prompt": "\\ud83d\\ude00"}]')
    )
    assert "surrogate" in prompts[0].skip
    assert prompts[1].skip is None and prompts[1].prompt == "\U0001f600"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"prompt": "a"}, "must hold a JSON list of {JSON_idx, prompt}, got an object"),
        ("3", "got a number"),
        ("[", "is not JSON"),
        ("", "is empty"),
        ("[]", "holds no prompt"),
        ('[{"prompt": "a", "x": NaN}]', "NaN is no number of JSON"),
        ('[{"prompt": "a", "x": 1e999}]', "1e999 is no number of JSON"),
        ("[" * 100_000, "is not JSON"),
        (["a"], "entry 0 must be an object {JSON_idx, prompt}, got a text"),
        ([{"prompt": "a"}, {"instruction": "b"}], "entry 1 lacks prompt; it has ['instruction']"),
        ([{"prompt": 3}], "prompt must be a text, got a number"),
        ([{"prompt": None}], "got null"),
        ([{"prompt": "a", "JSON_idx": -1}], "JSON_idx must be an integer"),
        ([{"prompt": "a", "JSON_idx": True}], "got a truth value"),
        ([{"prompt": "a", "JSON_idx": 1.5}], "JSON_idx must be an integer"),
        ([{"prompt": "a", "JSON_idx": "../1"}], "JSON_idx must be an integer"),
        ([{"prompt": "a", "JSON_idx": 10**30}], "JSON_idx must be an integer"),
        ([{"prompt": "a", "JSON_idx": 1}, {"prompt": "b"}], "JSON_idx 1 stands at entry 0"),
    ],
)
def test_bad_files_are_named_with_their_place(tmp_path: Path, content: Any, expected: str) -> None:
    with pytest.raises(ValueError) as error:
        load_prompts(write(tmp_path, content))
    assert expected in str(error.value)
    assert "p.json" in str(error.value)


def test_a_bad_line_of_jsonl_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2, is not JSON"):
        load_prompts(write(tmp_path, '{"prompt": "a"}\n{"prompt"\n', "p.jsonl"))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b'[{"prompt": "\xff"}]')
    with pytest.raises(ValueError, match="not UTF-8 text"):
        load_prompts(str(tmp_path / "p.json"))


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.prompts.LARGEST_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="more than the 10"):
        load_prompts(write(tmp_path, [{"prompt": "a"}]))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_prompts(str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match="is a folder"):
        load_prompts(str(tmp_path))


def test_a_data_set_id_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = {"instruction": ["a", "b"], "n": [1, 2]}
    made = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"instruction": ["t"]}),
            "test": datasets.Dataset.from_dict(rows),
        }
    )
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or made)
    prompts = load_prompts("someone/prompts")
    assert asked == ["someone/prompts"]
    assert [p.prompt for p in prompts] == ["a", "b"]
    assert prompts[1].record == {"instruction": "b", "n": 2, "prompt": "b", "JSON_idx": 1}


def test_a_data_set_that_does_not_load_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    def fails(name: str) -> None:
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(ValueError, match="no file here.*ConnectionError: no route"):
        load_prompts("someone/prompts")
