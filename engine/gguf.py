"""GGUF to an ordinary model folder, once.

A GGUF file holds everything: sizes, weights, vocabulary and chat template. It is dequantised into
float32 safetensors with the config and tokenizer files beside it, in a cache folder that appears
whole or not at all; from then on it loads like any other folder. Nothing but Llama-layout files
(llama, mistral through llama, qwen2, qwen3) is converted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.config import UnsupportedModel

ARCHITECTURES = ("llama", "qwen2", "qwen3")
HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How a text is split before merging, by the name that the file gives its splitter: digits apart,
# words by a pattern (None: GPT-2's), whole words before merges, Unicode normal form first.
GPT2_WORDS = None
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITTERS = {
    "default": (False, GPT2_WORDS, False, False),
    "gpt-2": (False, GPT2_WORDS, False, False),
    "smollm": (True, GPT2_WORDS, False, False),
    "llama-bpe": (False, LLAMA3_WORDS, True, False),
    "qwen2": (False, QWEN2_WORDS, False, True),
}
CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType
ROPE_FACTORS = "rope_freqs.weight"  # llama3 scaling, baked in; the config says it in words


def convert_gguf(file: Path, target: Path) -> Path:
    """Convert `file` into the model folder `target` unless it is there; returns `target`.

    Raises UnsupportedModel for a file that is not supported or not whole, FileNotFoundError, or
    OSError where the folder can't be written.
    """
    file, target = Path(file), Path(target)
    if (target / "config.json").is_file():
        return target
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such GGUF file")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        _write_model(file, scratch)
        _publish(scratch, target)
    except (UnsupportedModel, OSError):
        raise
    except Exception as error:  # a damaged file raises whatever its parsers raise
        raise UnsupportedModel(
            f"{file}: not a GGUF file, or not a whole one ({type(error).__name__}: {error})"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _publish(scratch: Path, target: Path) -> None:
    """Move the finished folder into place; another process may have been faster."""
    try:
        os.rename(scratch, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def _write_model(file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, {tensor.name for tensor in reader.tensors})
    weights = dict(_tensors(reader, config))
    try:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    except SafetensorError as error:  # so it calls a full disk
        raise OSError(str(error)) from error
    _write_tokenizer(fields, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _config(fields: dict, tensor_names: set[str]) -> dict:
    """The config.json that the file's metadata amounts to."""
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )

    def get(name: str, default=None):
        return fields.get(f"{architecture}.{name}", default)

    if ROPE_FACTORS in tensor_names or get("rope.scaling.type", "none") != "none":
        raise UnsupportedModel("GGUF files with rope scaling are not supported; use safetensors")
    heads = get("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("GGUF files that rotate a part of each head are not supported")
    return {
        "architectures": [HF_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


def _tensors(reader, config: dict):
    """(HF name, float32 tensor) of each tensor of the file."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem, kind = tensor.name.rsplit(".", 1)
        if config["model_type"] == "llama" and stem.endswith(("attn_q", "attn_k")):
            heads = "num_attention_heads" if stem.endswith("_q") else "num_key_value_heads"
            values = _unpermute(values, config[heads])
        yield f"{_hf_stem(stem)}.{kind}", torch.from_numpy(np.ascontiguousarray(values))


def _hf_stem(stem: str) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    name = TENSOR_NAMES.get(block[2] if block else stem)
    if name is None:
        raise UnsupportedModel(f"GGUF tensor {stem!r} has no place in a Llama-layout model")
    return f"model.layers.{block[1]}.{name}" if block else name


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Llama GGUF files interleave the two halves of each head's rotation pairs; HF does not."""
    return (
        values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def _write_tokenizer(fields: dict, folder: Path) -> None:
    """A byte-level BPE tokenizer as tokenizer.json; the only kind that such files use here."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise UnsupportedModel(
            f"GGUF tokenizer {fields.get('tokenizer.ggml.model')!r} is not supported (only gpt2)"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    digits, words, ignore_merges, compose = _splitter(fields.get("tokenizer.ggml.pre", "default"))
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if words is not None:
        steps.append(pre_tokenizers.Split(Regex(words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    special = [AddedToken(t, normalized=False, special=True) for t, k in kinds if k == CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == USER_DEFINED])
    # NOTE: its own `save` calls a full disk a bare Exception.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    named = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"))
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    settings = {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields.get("tokenizer.chat_template"),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.get(f"{fields['general.architecture']}.context_length"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _splitter(name: str) -> tuple[bool, str | None, bool, bool]:
    if name not in SPLITTERS:
        raise UnsupportedModel(
            f"GGUF tokenizer splits text by {name!r}, which is not supported; supported: "
            f"{', '.join(SPLITTERS)}"
        )
    return SPLITTERS[name]
