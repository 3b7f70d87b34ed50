"""Random reward models in the published layouts, and their scores by plain torch.

The checkpoints hold the tensor names and config fields of the real ones; the scores here are worked
out from transformers' backbones, without any of the suite's code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaModel, MistralModel

from tests.tiny import make_tiny_llama

LLAMA3_HEADER = ["<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "ĊĊ"]
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OBJECTIVES, GATING_HIDDEN, TEMPERATURE = 19, 24, 10


def merge_tokens(folder: Path, words: Sequence[str]) -> None:
    """Teach the byte tokenizer of `folder` these words, letter by letter, and Llama 3's splits."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": LLAMA3_WORDS},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    taken = max(*vocab.values(), *(t["id"] for t in content["added_tokens"])) + 1
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]], taken = taken, taken + 1
                merges.append([word[: end - 1], word[end - 1]])
    file.write_text(json.dumps(content), encoding="utf-8")


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 0.5


def _rewrite(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, **config}))


def make_armo(folder: Path, seed: int = 3) -> Path:
    """ArmoRM: Llama, regression of 19 objectives, gating of four layers, Llama 3's template."""
    make_tiny_llama(folder, vocab=320, chat_template=False, seed=seed)
    merge_tokens(folder, ["assistant", "ĊĊ"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = LLAMA3_TEMPLATE
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    hidden = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(seed)
    sizes = [hidden, GATING_HIDDEN, GATING_HIDDEN, GATING_HIDDEN, OBJECTIVES]
    for i in range(4):
        spread = 6 / sizes[i] ** 0.5  # a gating that is neither flat nor all on one objective
        tensors[f"gating.layers.{i}.weight"] = _noise(generator, sizes[i + 1], sizes[i]) * spread
        tensors[f"gating.layers.{i}.bias"] = _noise(generator, sizes[i + 1])
    tensors["gating.logit_scale"] = torch.tensor([1.7])
    tensors["regression_layer.weight"] = _noise(generator, OBJECTIVES, hidden)
    tensors["reward_transform_matrix"] = _noise(generator, OBJECTIVES, OBJECTIVES)
    config = {
        "architectures": ["LlamaForRewardModelWithGating"],
        "num_objectives": OBJECTIVES,
        "gating_temperature": TEMPERATURE,
        "gating_hidden_dim": GATING_HIDDEN,
        "gating_n_hidden": 3,
    }
    _rewrite(folder, tensors, config)
    return folder


def armo_score(folder: Path, ids: list[int]) -> float:
    """As the published code finds its header: from the last occurrence of five ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    header = tokenizer.convert_tokens_to_ids(LLAMA3_HEADER)
    place = next(i for i in range(len(ids) - 5, -1, -1) if ids[i : i + 5] == header)
    t = load_file(folder / "model.safetensors")
    hidden = _hidden(LlamaModel, folder, t, "model.", ids)
    x = hidden[place]
    for i in range(4):
        x = t[f"gating.layers.{i}.weight"] @ x + t[f"gating.layers.{i}.bias"]
        x = x.clamp(min=0) if i < 3 else x
    gating = torch.softmax(x / TEMPERATURE, 0) * t["gating.logit_scale"][0]
    rewards = t["regression_layer.weight"] @ hidden[-1]
    return float((gating * (rewards @ t["reward_transform_matrix"])).sum())


def make_eurus(folder: Path, seed: int = 4) -> Path:
    """Eurus: Mistral with one linear layer, no bias."""
    make_tiny_llama(folder, arch="mistral", chat_template=False, seed=seed)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(seed)
    tensors["regression_head.weight"] = _noise(generator, 1, 32)
    _rewrite(folder, tensors, {"architectures": ["EurusRewardModel"]})
    return folder


def eurus_score(folder: Path, ids: list[int]) -> float:
    t = load_file(folder / "model.safetensors")
    hidden = _hidden(MistralModel, folder, t, "model.", ids)
    return float(t["regression_head.weight"][0] @ hidden[-1])


def make_farm(folder: Path, seed: int = 5, with_sizes: bool = True) -> Path:
    """AlpacaFarm: a whole Llama under `backbone_model.`, and a linear head with a bias.

    Without sizes the config names the model that it was trained from, which lies beside it.
    """
    make_tiny_llama(folder, chat_template=False, seed=seed)
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"backbone_model.{name}": tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors["reward_head.weight"] = _noise(generator, 1, 32)
    tensors["reward_head.bias"] = _noise(generator, 1)
    _rewrite(folder, tensors, {"architectures": ["RewardModel"]})
    if not with_sizes:
        base = make_tiny_llama(folder.parent / "llama-7b-base", seed=seed)
        named = {"backbone_model_name_or_path": f"/somewhere/{base.name}/"}
        bare = {"architectures": ["RewardModel"], "model_type": "reward_model", **named}
        (folder / "config.json").write_text(json.dumps(bare))
    return folder


def farm_score(folder: Path, ids: list[int]) -> float:
    t = load_file(folder / "model.safetensors")
    hidden = _hidden(LlamaModel, folder, t, "backbone_model.model.", ids)
    return float(t["reward_head.weight"][0] @ hidden[-1] + t["reward_head.bias"][0])


def _hidden(
    kind: type, folder: Path, tensors: dict[str, torch.Tensor], prefix: str, ids: list[int]
) -> torch.Tensor:
    """`[tokens, hidden]` of transformers' backbone with these tensors in it."""
    from transformers import AutoConfig

    raw = json.loads((folder / "config.json").read_text())
    base = Path(raw.get("backbone_model_name_or_path", "")).name  # beside it, if it has no sizes
    model = kind(AutoConfig.from_pretrained(folder.parent / base if base else folder)).eval()
    mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    model.load_state_dict(mine, strict=True)
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def classifier_scores(folder: Path, sequences: list[list[int]], side: str) -> list[float]:
    """One padded batch through transformers' own sequence classifier."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    longest = max(map(len, sequences))
    pads = [[0] * (longest - len(ids)) for ids in sequences]
    left = side == "left"
    rows = [p + s if left else s + p for s, p in zip(sequences, pads, strict=True)]
    masks = [[0] * len(p) + [1] * len(s) for s, p in zip(sequences, pads, strict=True)]
    mask = torch.tensor(masks if left else [m[::-1] for m in masks])
    with torch.inference_mode():
        return model(torch.tensor(rows), attention_mask=mask).logits[:, 0].tolist()
