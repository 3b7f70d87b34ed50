"""What the README claims to be reproducible: a record holds all that it takes to make it again.

That a candidate is the same text in any company is tests/test_methods.py; that a resumed run equals
an uninterrupted one, tests/test_main_cli.py; two engines on one GPU, tests/test_gpu.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

import main
from suite.settings import Settings
from tests.launch import records

DEFAULTS = Settings()
METHODS = {
    "best of n": ["--batch_size", "5"],
    "partial scores": ["--batch_size", "5", "--log_partial", "4,8"],
    "waves": ["--batch_size", "9", "--kv_cache_gb", "0.0002"],
    "sampling": ["--batch_size", "4", "--top_p", "0.9", "--top_k", "9", "--temperature", "0.7"],
    "rejection": ["--speculative_rejection", "--init_batch_size", "12", "--kv_cache_gb", "0.0002"],
    "refill": [
        *("--speculative_rejection", "--init_batch_size", "8", "--refill", "--schedule", "halving"),
        *("--min_tokens", "8", "--alpha", "auto"),
    ],
}


def line_from(made: dict[str, Any]) -> list[str]:
    """The command line, from nothing but the record."""
    line = []
    for field in dataclasses.fields(Settings):
        if field.name == "output_folder":
            continue
        value = made[field.name]
        if value is True:
            line.append(f"--{field.name}")
        elif value != getattr(DEFAULTS, field.name):
            line += [f"--{field.name}", str(value)]
    return line


@pytest.mark.parametrize("method", METHODS)
def test_a_record_is_enough_to_make_it_again(
    tiny_models: Path, tmp_path: Path, method: str
) -> None:
    """The settings and the prompt that stand in a JSON give the same JSON, in a fresh engine."""
    entries = [{"JSON_idx": 41, "prompt": "one"}, {"JSON_idx": 7, "prompt": "two", "more": [1]}]
    data = tmp_path / "p.json"
    data.write_text(json.dumps(entries))
    given = ["--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward", "--seed", "11"]
    given += ["--model_dir", str(tiny_models), "--data_filename", str(data), "--save_token_ids"]
    given += ["--max_gen_tokens", "100", *METHODS[method]]
    assert main.main([*given, "--output_folder", str(tmp_path / "first")]) == 0
    first = records(tmp_path / "first")
    (made,) = first["tiny-llama_tiny-reward_prompt_0007.json"]
    assert made["prompt"] == entries[1]
    data.write_text(json.dumps([made["prompt"]]))  # alone, and not in the second place
    assert main.main([*line_from(made), "--output_folder", str(tmp_path / "again")]) == 0
    (again,) = records(tmp_path / "again").values()
    assert again == [made]


def test_a_record_names_seed_plan_versions_and_device(tiny_models: Path, tmp_path: Path) -> None:
    given = ["--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward", "--seed", "11"]
    given += ["--model_dir", str(tiny_models), "--num_prompts", "1", "--max_gen_tokens", "8"]
    given += ["--batch_size", "2", "--output_folder", str(tmp_path)]
    assert main.main(given) == 0
    ((made,),) = [json.loads(p.read_text()) for p in tmp_path.glob("*_prompt_*.json")]
    assert (made["seed"], made["process_seed"], made["process_rank"]) == (11, 11, 0)
    assert made["num_processes"] == 1 and made["device"]
    assert made["plan"]["max_rows"] == 2 and made["plan"]["pages"] > 0
    for package in ("torch", "transformers", "tokenizers", "safetensors", "numpy"):
        assert made["versions"][package] == importlib.metadata.version(package)


@pytest.mark.parametrize("change", [["--seed", "12"], ["--temperature", "0.9"]])
def test_other_seeds_and_settings_give_other_texts(
    tiny_models: Path, tmp_path: Path, change: list[str]
) -> None:
    """What would be equal anyway could not show that a seed is kept."""
    given = ["--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward", "--seed", "11"]
    given += ["--model_dir", str(tiny_models), "--num_prompts", "1", "--max_gen_tokens", "40"]
    texts = []
    for name, more in (("a", []), ("b", change)):
        assert main.main([*given, *more, "--output_folder", str(tmp_path / name)]) == 0
        (made,) = records(tmp_path / name).values()
        texts.append([t["output"] for t in made[0]["trajectories"]])
    assert texts[0] != texts[1]
