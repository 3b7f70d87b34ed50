"""What a run is asked to do: `Settings`, the names derived from it, and when two runs are the same.

Imports nothing heavy. A `Settings` from `suite.arguments` obeys every rule there; code that builds
one by hand (tests, benchmarks) answers for itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent

# These change neither texts nor scores, so a folder may be resumed with other values of them. The
# prompts are compared by their own text instead of their file's name, `keep_fraction` as `alpha`.
NOT_FOR_SAMENESS = frozenset(
    (
        "data_filename",
        "output_folder",
        "model_dir",
        "keep_fraction",
        "num_prompts",
        "pretty_print_output",
        "record_memory",
        "local_files_only",
        "reward_timeout",
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """One field for each flag. `alpha` is always the resolved rejection rate (or "auto")."""

    data_filename: str = "prompts/demo.json"
    output_folder: str | None = None
    model_dir: str | None = None
    llm_name: str = "SmolLM2-135M-Instruct"
    reward_model_name: str = "SmolLM2-135M-Reward"
    speculative_rejection: bool = False
    alpha: float | str = 0.5
    keep_fraction: float | None = None
    max_tokens: int = 2048
    max_gen_tokens: int = 2048
    batch_size: int = 20
    seed: int = 0
    top_k: int = 50
    top_p: float = 1.0
    temperature: float = 1.0
    pretty_print_output: bool = False
    record_memory: bool = False
    local_files_only: bool = False
    dtype: str | None = None
    prompt_template: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_gb: float | None = None
    init_batch_size: int | None = None
    max_batch_size: int | None = None
    min_round_tokens: int = 8
    parallel: str = "candidates"
    reward_cache: str = "auto"
    save_token_ids: bool = False
    ignore_stop: bool = False
    reward_timeout: float | None = None
    refill: bool = False
    refill_to: float = 1.0
    value_head: str | None = None
    log_hidden: bool = False
    log_partial: str | None = None
    schedule: str = "memory"
    min_tokens: int = 0
    num_prompts: int | None = None

    @property
    def self_reward(self) -> bool:
        return self.llm_name == self.reward_model_name


def settings_for_record(settings: Settings) -> dict[str, Any]:
    """Every setting by name, ready for JSON; a value head also by what it holds."""
    made = dataclasses.asdict(settings)
    if settings.value_head is not None:
        made["value_head_sha256"] = _file_sha256(Path(settings.value_head))
    return made


def _file_sha256(path: Path) -> str | None:
    """None where the file can't be read: who loads it says so."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def settings_for_sameness(recorded: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to share a folder, from their recorded settings."""
    names = {field.name for field in dataclasses.fields(Settings)} - NOT_FOR_SAMENESS
    same = {name: recorded.get(name) for name in sorted(names)}
    head = same.pop("value_head")  # its content counts, not where it lies
    same["value_head_sha256"] = None if head is None else recorded.get("value_head_sha256")
    if recorded.get("speculative_rejection"):
        same["batch_size"] = None  # of Best-of-N alone
    return same


def base_name(model_name: str) -> str:
    """The last part of a model's name, safe inside a file name: `org/Model-8B` -> `Model-8B`."""
    last = model_name.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", last).strip("-.")[:80] or "model"


def output_folder(settings: Settings, num_processes: int) -> Path:
    """The run's folder: `--output_folder`, or `archive/<method>_<llm>_<reward>_<seed>`."""
    if settings.output_folder is not None:
        return Path(settings.output_folder)
    if settings.speculative_rejection:
        method = f"{'SpRF' if settings.refill else 'SpR'}_alpha_{settings.alpha}"
    else:
        spread = num_processes if settings.parallel == "candidates" else 1
        method = f"Bo{settings.batch_size * spread}"
    models = f"{base_name(settings.llm_name)}_{base_name(settings.reward_model_name)}"
    return PROJECT / "archive" / f"{method}_{models}_{settings.seed}"
