"""Is this folder a model that the suite can load? Answered without reading a weight.

Reads config.json and the headers of the safetensors files (a few kilobytes each), so that a
truncated download, a pickled checkpoint or an unknown architecture costs a second. Never unpickles,
never imports code from the folder.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

GENERATORS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
CLASSIFIERS = (
    "LlamaForSequenceClassification",
    "MistralForSequenceClassification",
    "Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification",
)
HEADS = (
    "LlamaForRewardModelWithGating",  # ArmoRM
    "EurusRewardModel",
    "RewardModel",  # the AlpacaFarm pair
)
SUPPORTED = {"generator": GENERATORS, "reward": (*CLASSIFIERS, *HEADS, *GENERATORS)}
ADAPTER_FORMAT = "speculative-rejection-reward-adapter"  # in the config.json of such a folder
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
LARGEST_JSON_BYTES = 64 * 2**20
LARGEST_HEADER_BYTES = 100_000_000  # the format's own bound


class NotAModel(ValueError):
    """The folder can't be loaded; the message says what is wrong and what helps."""


def check_folder(folder: Path, role: str) -> str:
    """The architecture's name; raises NotAModel."""
    config = read_json(folder / "config.json")
    architecture = _architecture(config, folder, role)
    _check_weights(folder)
    _check_sizes(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise NotAModel(f"{folder} has no tokenizer ({', '.join(TOKENIZERS)}); copy it there too")
    return architecture


def is_adapter(folder: Path) -> bool:
    """A reward that is an adapter and head on another model, in the suite's own format."""
    try:
        return read_json(folder / "config.json").get("format") == ADAPTER_FORMAT
    except NotAModel:
        return False


def check_adapter(folder: Path) -> None:
    """An adapter's files are there and whole; its base model is found by name when it loads."""
    config = read_json(folder / "config.json")
    if not isinstance(config.get("base_model"), str):
        raise NotAModel(f"{folder}/config.json names no base_model; copy the adapter again")
    _check_weights(folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder, of bounded size."""
    if not path.is_file():
        raise NotAModel(f"{path.parent} has no {path.name}; a model folder must hold one")
    if path.stat().st_size > LARGEST_JSON_BYTES:
        raise NotAModel(f"{path} is larger than {LARGEST_JSON_BYTES:,} bytes; that is no config")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise NotAModel(f"{path} is not valid JSON ({e}); download it again") from e
    if not isinstance(content, dict):
        raise NotAModel(f"{path} must hold a JSON object; download it again")
    return content


def _check_sizes(folder: Path) -> None:
    """Tokenizer files and templates are parsed whole by others: none may be absurdly large."""
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja") and path.stat().st_size > LARGEST_JSON_BYTES:
            raise NotAModel(
                f"{path} is larger than {LARGEST_JSON_BYTES:,} bytes; download it again"
            )


def _architecture(config: dict[str, Any], folder: Path, role: str) -> str:
    named = config.get("architectures")
    supported = SUPPORTED[role]
    for architecture in named if isinstance(named, list) else []:
        if architecture in supported:
            _check_labels(config, architecture, folder)
            return architecture
    if role == "generator" and isinstance(named, list) and set(named) & set(SUPPORTED["reward"]):
        raise NotAModel(f"{folder} is a reward model ({named[0]}); give it as --reward_model_name")
    raise NotAModel(
        f"{folder}/config.json names architectures {json.dumps(named)[:200]}; supported: "
        f"{', '.join(supported)}"
    )


def _check_labels(config: dict[str, Any], architecture: str, folder: Path) -> None:
    if architecture not in CLASSIFIERS:
        return
    # Where the config says nothing, the shape of the head decides when it is loaded.
    labels = config.get("num_labels") or len(config.get("id2label") or ()) or 1
    if labels != 1:
        raise NotAModel(f"{folder}: a reward model must have one label, its config has {labels}")


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise NotAModel(f"{index} lists no weights; download it again")
        names = sorted({str(name) for name in shards.values()})
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise NotAModel(_no_weights(folder))
    for name in names:
        if "/" in name or name.startswith("."):
            raise NotAModel(f"{index} names a file outside its folder ({name[:100]!r})")
        check_safetensors(folder / name)


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        return (
            f"{folder} holds pickled weights only ({', '.join(pickled[:3])}), which can run code; "
            "convert them to safetensors: load them where you trust them and call "
            "save_pretrained(folder, safe_serialization=True)"
        )
    there = sorted(path.name for path in folder.iterdir())
    return f"{folder} has no *.safetensors weights; it holds {', '.join(there[:8]) or 'nothing'}"


def check_safetensors(path: Path) -> None:
    """The header parses and the file has the length that the header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(LARGEST_HEADER_BYTES, size - 8):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError as e:
        raise NotAModel(f"{path} is missing; download it again") from e
    except OSError as e:
        raise NotAModel(f"{path} can't be read ({e.strerror})") from e
    except (ValueError, struct.error, AttributeError, KeyError, IndexError, TypeError) as e:
        raise NotAModel(f"{path} is corrupt ({e}); download it again") from e
    if end + 8 + length != size:
        raise NotAModel(
            f"{path} has {size:,} bytes where its header says {end + 8 + length:,}; the download "
            "was cut short: download it again"
        )
