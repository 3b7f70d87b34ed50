"""Tiny random models in the ordinary Hugging Face layout, for tests on a CPU.

`make_tiny_llama` writes a causal model, `make_tiny_reward` a one-label sequence classifier; both
come with a byte-level tokenizer (every text can be encoded, one token a byte) whose turns look like
ChatML. The weights depend on `seed` alone: written twice, the folder holds the same model.
Nothing here is used by the suite itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = "<|pad|>", "<|im_start|>", "<|im_end|>"
NUM_TOKENS = 3 + 256  # pad 0, bos 1, eos 2, then the bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def make_tiny_llama(
    folder: str | Path,
    arch: str = "llama",
    vocab: int = NUM_TOKENS,
    chat_template: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes a two-layer causal model of `arch`; `config` overrides any field of its config."""
    folder = Path(folder)
    _write_tokenizer(folder, chat_template)
    model = AutoModelForCausalLM.from_config(_config(arch, vocab, config), dtype=torch.float32)
    _save(model, folder, seed)
    return folder


def make_tiny_reward(
    folder: str | Path,
    arch: str = "llama",
    vocab: int = NUM_TOKENS,
    chat_template: bool = True,
    seed: int = 1,
    **config: Any,
) -> Path:
    """Writes a sequence classifier with one label on the same tokenizer."""
    folder = Path(folder)
    _write_tokenizer(folder, chat_template)
    made = _config(arch, vocab, {"num_labels": 1, **config})
    model = AutoModelForSequenceClassification.from_config(made, dtype=torch.float32)
    _save(model, folder, seed)
    return folder


def _config(arch: str, vocab: int, overrides: dict[str, Any]) -> Any:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {ARCHITECTURES}, got {arch!r}")
    if vocab < NUM_TOKENS:
        raise ValueError(f"vocab must be at least {NUM_TOKENS} for the byte tokenizer, got {vocab}")
    fields = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # large enough that the logits are far from uniform
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    return AutoConfig.for_model(arch, **fields)


def _save(model: torch.nn.Module, folder: Path, seed: int) -> None:
    """Draws every weight from `seed`, in name order, and writes safetensors."""
    generator = torch.Generator().manual_seed(seed)
    spread = model.config.initializer_range
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator) * spread
            weight.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else noise)
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, chat_template: bool) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate((PAD, BOS, EOS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (PAD, BOS, EOS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
