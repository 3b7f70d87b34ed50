"""What a trained reward model is on disk, and loading it again through `transformers` and `peft`.

With LoRA: `adapter_model.safetensors` holds peft's names
(`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, [rank, in], and `lora_B`,
[out, rank]; the weight is W + alpha / rank * B @ A) and `score.weight` [1, hidden] float32. Rank
0 writes a whole Hugging Face sequence classifier with its tokenizer instead. Either config says
under `scoring` how the suite is to make a conversation, which is checked before training.
Invariant: a name that the model lacks, or a weight that the file lacks, is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.reward_training.backbone import (
    TARGET_MODULES,
    RewardModel,
    load_backbone,
    lora_config,
)
from benchmarks.reward_training.pairs import Facts, encode_records, sequences
from benchmarks.reward_training.training import Recipe
from rewards.loading import ADAPTER_FORMAT, CLASSIFIER_FORMAT, scoring_chat

WEIGHTS = "adapter_model.safetensors"
CONFIG = "config.json"
PROBE = {"prompt": "Why is the sky blue?", "chosen": "Because.", "rejected": "It is not."}


def scoring_facts(tokenizer: Any, facts: Facts, max_length: int) -> dict[str, Any]:
    """How the suite makes the ids of a conversation: as they were trained on, or ValueError.

    The generation prompt can differ from what a template writes before a finished answer (Qwen3's
    empty thoughts, Mistral's blank), so the one that gives the trained ids is written down.
    """
    scoring = {
        "template": facts.template,
        "add_generation_prompt": True,
        "system_turn": "the template's own",
        "score_token": facts.turn_end,
        "score_token_id": facts.turn_end_id,
        "score_position": "the token that ends the assistant's turn; nothing after it is kept",
        "unfinished_answer": "the turn end is put after the answer so far, and read",
        "max_length": max_length,
    }
    pairs, _ = encode_records([PROBE], tokenizer, 1 << 20)
    trained = [row.tolist() for row in sequences(pairs, facts)]
    answers = [PROBE["chosen"], PROBE["rejected"]]
    for generation in (True, False):
        found = {**scoring, "add_generation_prompt": generation}
        if scoring_chat(tokenizer, found).conversation_ids(PROBE["prompt"], answers) == trained:
            return found
    raise ValueError(
        "the tokenizer gives one text other ids in parts than as a whole, so main.py would score "
        f"other ids than are trained (first pair: {trained[0][-12:]}); take a base model with a "
        "tokenizer.json whose chat template writes control tokens around the answer"
    )


def save_package(
    model: RewardModel,
    tokenizer: Any,
    folder: Path,
    base_name: str,
    base_file: Path,
    recipe: Recipe,
    scoring: dict[str, Any],
    training: dict[str, Any],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.rank == 0:
        _save_whole(model, tokenizer, folder, scoring, {**asdict(recipe), **training})
        return
    tensors = {
        name: weight.detach().cpu().to(torch.float32 if name == "score.weight" else torch.float16)
        for name, weight in model.trained().items()
    }
    partial = folder / "adapter_model.part"
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial, {"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    text = json.dumps(
        package_config(model, base_name, base_file, recipe, scoring, training), indent=2
    )
    (folder / CONFIG).write_text(text + "\n")
    _save_peft_config(folder, recipe, base_name)


def _save_whole(
    model: RewardModel,
    tokenizer: Any,
    folder: Path,
    scoring: dict[str, Any],
    training: dict[str, Any],
) -> None:
    model.classifier.config.architectures = [type(model.classifier).__name__]
    model.classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / CONFIG
    told = {"format": CLASSIFIER_FORMAT, "num_labels": 1, "scoring": scoring, "training": training}
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}, indent=2) + "\n")


def _save_peft_config(folder: Path, recipe: Recipe, base_name: str) -> None:
    """`adapter_config.json` as `PeftModel.from_pretrained` reads it, the same for every run."""
    lora_config(recipe.rank, recipe.lora_alpha, base_name=base_name).save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    content = json.loads(path.read_text())
    content["target_modules"] = sorted(content["target_modules"])  # peft keeps a set
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def package_config(
    model: RewardModel,
    base_name: str,
    base_file: Path,
    recipe: Recipe,
    scoring: dict[str, Any],
    training: dict[str, Any],
) -> dict[str, Any]:
    config = model.classifier.config
    return {
        "format": ADAPTER_FORMAT,
        "format_version": 1,
        "architectures": [type(model.classifier).__name__],
        "model_type": config.model_type,
        "base_model": base_name,
        "base_weights": _base_weights(base_file),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_labels": 1,
        "pad_token_id": config.pad_token_id,
        "lora": {
            "rank": recipe.rank,
            "alpha": recipe.lora_alpha,
            "scaling": recipe.lora_alpha / recipe.rank,
            "target_modules": list(TARGET_MODULES),
            "dtype": "float16",
        },
        "head": {"tensor": "score.weight", "shape": [1, config.hidden_size], "bias": False},
        "scoring": scoring,
        "training": {**asdict(recipe), **training},
    }


def _base_weights(path: Path) -> dict[str, str]:
    """Which file was trained on; a folder is named by its config alone."""
    file = path if path.is_file() else path / "config.json"
    return {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def load_package(
    folder: Path, base: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[RewardModel, Facts, dict[str, Any]]:
    """The scorer of `folder` on the base weights at `base`, through `transformers` and `peft`."""
    config = json.loads((folder / CONFIG).read_text())
    if config.get("format") != ADAPTER_FORMAT:
        raise ValueError(f"{folder / CONFIG}: format must be {ADAPTER_FORMAT!r}")
    scoring = config["scoring"]
    facts = Facts(
        scoring["score_token"],
        scoring["score_token_id"],
        config["pad_token_id"],
        scoring["template"],
    )
    lora = config["lora"]
    model = RewardModel(load_backbone(base, facts, dtype), lora["rank"], lora["alpha"], 0.0)
    tensors = load_file(folder / WEIGHTS)
    weights = model.trained()
    wrong = sorted(tensors.keys() ^ weights.keys())
    if wrong:
        raise ValueError(
            f"{folder / WEIGHTS} and the model differ in {len(wrong)} names: {wrong[:5]}"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    return model.to(device).eval(), facts, config
