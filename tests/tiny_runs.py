"""Command lines on the tiny models of tests/tiny.py."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch import launcher

MODELS = ["--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward"]
SHORT = ["--max_gen_tokens", "24", "--batch_size", "3", "--num_prompts", "3", "--seed", "5"]
# Twelve rows of two pages (64 tokens) fill the budget of 24 pages; a third page needs a cut.
REJECTING = [
    *("--speculative_rejection", "--alpha", "0.5", "--init_batch_size", "12"),
    *("--max_gen_tokens", "120", "--kv_cache_gb", "0.0002", "--reward_cache", "off"),
    *("--num_prompts", "3", "--seed", "5"),
]
# Long enough that a kill lands between two files: some 0.2 s a prompt.
KILLED = {
    "bon": [*SHORT, "--max_gen_tokens", "100", "--batch_size", "8", "--num_prompts", "8"],
    "spr": [*REJECTING, "--num_prompts", "8"],
}


def prompt_file(tmp_path: Path, *texts: str) -> list[str]:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"JSON_idx": i, "prompt": t} for i, t in enumerate(texts)]))
    return ["--data_filename", str(path)]


def real(num_processes: int, models: Path, out: Path, *flags: str) -> list[str]:
    where = ["--model_dir", str(models), "--output_folder", str(out)]
    return [*launcher(num_processes), "main.py", *MODELS, *where, *flags]
