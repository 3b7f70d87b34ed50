"""From a model's source to its weights and head. Which kind it is follows from its config alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.config import ModelConfig, UnsupportedModel, read_config
from engine.model import Transformer
from engine.weights import BadWeights, load_model, merge_lora
from rewards.heads import ARMO_HEADER, Head, build_head, head_names
from suite.chat import KEEP, Chat, chat_format, load_tokenizer, reward_chat
from suite.model_files import GENERATORS
from suite.models import ModelSource, resolve

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_FORMAT = "speculative-rejection-reward-adapter"
CLASSIFIER_FORMAT = "speculative-rejection-reward-classifier"  # benchmarks/train_reward.py's whole
PEFT_PREFIX = "base_model.model.model."


@dataclasses.dataclass(slots=True)
class RewardModel:
    """A reward model that the engine can read with."""

    backbone: Transformer
    head: Head
    chat: Chat


def load_reward_model(source: ModelSource, dtype: torch.dtype, device: torch.device) -> RewardModel:
    """Load a reward model's weights, head and tokenizer. Raises ValueError with the reason."""
    folder = source.ready()
    raw = read_config(folder)
    if raw.get("format") == ADAPTER_FORMAT:
        return _load_adapter(folder, raw, dtype, device, source.local_files_only)
    architecture = source.architecture
    if architecture in GENERATORS:
        raise ValueError(
            f"{source.name} is a language model without a reward head; to reward answers by "
            "perplexity, give the same name as --llm_name and --reward_model_name"
        )
    if raw.get("format") == CLASSIFIER_FORMAT:
        chat = _trained_chat(folder, folder, raw.get("scoring"))
    else:
        chat = reward_chat(folder, source.name, architecture)
    if architecture == "LlamaForRewardModelWithGating":
        _check_header(folder, chat)
    prefix = "backbone_model." if architecture == "RewardModel" else ""
    config = backbone_config(folder, raw, architecture)
    backbone, tensors = load_model(
        folder,
        dtype,
        device,
        config=config,
        prefix=prefix,
        head_names=head_names(architecture, raw),
    )
    shape = {**raw, "hidden_size": config.hidden_size}
    return RewardModel(backbone, build_head(architecture, shape, tensors), chat)


def scoring_chat(tokenizer: Any, scoring: dict[str, Any]) -> Chat:
    """Conversations as benchmarks/train_reward.py makes them: the score token ends each."""
    form = chat_format(tokenizer, generation=bool(scoring.get("add_generation_prompt")))
    form = dataclasses.replace(form, after=scoring["score_token"], answer_trim=KEEP)
    return Chat(tokenizer, form)


def _trained_chat(folder: Path, tokenizer_folder: Path, scoring: Any) -> Chat:
    """By what the trainer wrote into the config of `folder`."""
    if not isinstance(scoring, dict) or not isinstance(scoring.get("score_token"), str):
        raise BadWeights(f"{folder}/config.json names no scoring.score_token; copy it again")
    chat = scoring_chat(load_tokenizer(tokenizer_folder), scoring)
    if chat.after_ids != [scoring.get("score_token_id")]:
        raise BadWeights(
            f"{folder}: the score is read at {scoring['score_token']!r}, id "
            f"{scoring.get('score_token_id')}; the tokenizer of {tokenizer_folder} makes it "
            f"{chat.after_ids}: take the tokenizer that it was trained with"
        )
    return chat


def _check_header(folder: Path, chat: Chat) -> None:
    """ArmoRM's gating is read at the first token of the assistant's header."""
    header = tuple(chat.tokenizer.convert_ids_to_tokens(chat.header_ids))
    if header != ARMO_HEADER:
        raise ValueError(
            f"{folder}: the chat template puts {' '.join(header)} between prompt and answer; "
            f"ArmoRM reads its gating at the first token of {' '.join(ARMO_HEADER)}, so take the "
            "published tokenizer"
        )


def backbone_config(folder: Path, raw: dict, architecture: str) -> ModelConfig:
    """The config of a reward model's backbone.

    AlpacaFarm's config has no sizes, only the name of the model it was trained from: that model's
    folder must lie beside this one. "Tied" saves the output matrix, which no head uses.
    """
    if architecture != "RewardModel" or "hidden_size" in raw:
        return ModelConfig.from_dict({**raw, "tie_word_embeddings": True})
    named = str(raw.get("backbone_model_name_or_path", "")).rstrip("/").rsplit("/", 1)[-1]
    beside = Path(folder).resolve().parent / named
    if not named or not (beside / "config.json").is_file():
        raise UnsupportedModel(
            f"{folder}: the config has no sizes; put the model that it was trained from "
            f"({named or 'unnamed'}) beside it, or copy its sizes into config.json"
        )
    return ModelConfig.from_dict({**read_config(beside), "tie_word_embeddings": True})


def _load_adapter(
    folder: Path, raw: dict, dtype: torch.dtype, device: torch.device, local_files_only: bool
) -> RewardModel:
    """A LoRA adapter and head on a base model that is found by name; merged into the weights."""
    try:
        named, architecture = raw["base_model"], raw["architectures"][0]
        scaling = float(raw["lora"]["scaling"])
        tensors = load_file(folder / ADAPTER_FILE)
    except (KeyError, IndexError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise BadWeights(
            f"{folder}: not a whole reward adapter ({type(error).__name__}: {error})"
        ) from error
    if not math.isfinite(scaling):
        raise BadWeights(f"{folder}: the adapter's scaling is {scaling}; copy the adapter again")
    try:
        base = resolve(named, local_files_only=local_files_only, role="generator")
    except ValueError as error:
        raise ValueError(f"{folder}: its base model can't be found: {error}") from error
    base_folder = base.ready()
    backbone, _ = load_model(base_folder, dtype, device)
    names = head_names(architecture, raw)
    head = {n: tensors.pop(n).to(device, torch.float32) for n in names if n in tensors}
    stray = [name for name in tensors if not name.startswith(PEFT_PREFIX)]
    if stray or len(head) < len(names):
        raise BadWeights(f"{folder}: expected {names} and an adapter, got also {stray[:4]}")
    merge_lora(backbone, tensors, scaling, PEFT_PREFIX)
    if "scoring" in raw:
        chat = _trained_chat(folder, base_folder, raw["scoring"])
    else:
        chat = reward_chat(base_folder, base.name, architecture, cut_after=True)
    shape = {"hidden_size": backbone.config.hidden_size}
    return RewardModel(backbone, build_head(architecture, shape, head), chat)
