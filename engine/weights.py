"""Weights from a model folder (safetensors, sharded or not) into a Transformer.

Tensors are streamed one at a time into their place in the fused matrices, so that no second copy
of the model is ever in memory. Every tensor must have a place and every place a tensor: a missing
or unknown name is an error, never a warning. Pickled checkpoints are refused: they can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.config import ModelConfig
from engine.model import Transformer

PICKLED = (".bin", ".pt", ".pth", ".pkl")


class BadWeights(ValueError):
    """A checkpoint is missing, corrupt, pickled, or does not fit its config."""


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    config: ModelConfig | None = None,
    prefix: str = "",
    head_names: tuple[str, ...] = (),
) -> tuple[Transformer, dict[str, torch.Tensor]]:
    """Load the model in `folder`; returns it and the float32 tensors of its head.

    `prefix` stands before the backbone's names ("backbone_model." in AlpacaFarm's reward models).
    `head_names` are the tensors beside the backbone; each must be there. Names that end a generator
    (`lm_head.weight`) may be absent from, or unused in, a model that has a head.
    Raises BadWeights.
    """
    config = config or ModelConfig.from_folder(folder)
    _refuse_other_size(folder, config)
    model = Transformer(config, dtype, device)
    places = _places(model, prefix)
    head: dict[str, torch.Tensor] = {}
    unknown = []
    for name, tensor in iter_tensors(folder):
        if name in head_names:
            head[name] = tensor.to(device, torch.float32)
        elif name in places:
            _fill(places.pop(name), tensor, name)
        elif not _is_ignorable(name, model, bool(head_names)):
            unknown.append(name)
    if head_names:  # a reward model has no use for the vocabulary's matrix
        places.pop(prefix + "lm_head.weight", None)
    missing = sorted(places) + [name for name in head_names if name not in head]
    if missing or unknown:
        raise BadWeights(
            f"{folder}: the weights do not fit this kind of model"
            f"{_listed('; missing: ', missing)}{_listed('; not used: ', unknown)}"
        )
    return model, head


def _refuse_other_size(folder: Path, config: ModelConfig) -> None:
    """A config can claim any size: one byte a parameter must be there before memory is taken."""
    needed = config.num_layer_params + config.vocab_size * config.hidden_size
    size = sum(path.stat().st_size for path in weight_files(folder))
    if needed > size:
        raise BadWeights(
            f"{folder}: config.json describes {needed:,} parameters, the weight files have "
            f"{size:,} bytes: download it again, or take the config that belongs to them"
        )


def iter_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) over all safetensors files of a folder, one tensor in memory a time."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadWeights(f"{path}: cannot be read ({error}); download it again") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that the index names, or the single one."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(shards.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadWeights(f"{index}: not a weight index ({error!r})") from error
        absent = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
        if absent:
            raise BadWeights(f"{folder}: weight files missing: {', '.join(absent)}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLED)
    if pickled:
        raise BadWeights(
            f"{folder}: only pickled weights ({', '.join(pickled[:3])}), which can run code; "
            "convert them to safetensors: save_pretrained(..., safe_serialization=True)"
        )
    raise BadWeights(f"{folder}: no *.safetensors file")


def _places(model: Transformer, prefix: str) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the view of the model's memory that it fills."""
    c = model.config
    places = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm,
    }
    if not c.tied_embeddings:
        places["lm_head.weight"] = model.lm_head
    sizes = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        places[at + "input_layernorm.weight"] = layer.input_norm
        places[at + "post_attention_layernorm.weight"] = layer.post_norm
        places[at + "self_attn.o_proj.weight"] = layer.o
        places[at + "mlp.down_proj.weight"] = layer.down
        gate, up = layer.gate_up.split(c.intermediate_size)
        places[at + "mlp.gate_proj.weight"], places[at + "mlp.up_proj.weight"] = gate, up
        for name, weight in zip("qkv", layer.qkv.split(sizes), strict=True):
            places[at + f"self_attn.{name}_proj.weight"] = weight
        if layer.qkv_bias is not None:
            for name, bias in zip("qkv", layer.qkv_bias.split(sizes), strict=True):
                places[at + f"self_attn.{name}_proj.bias"] = bias
        if layer.o_bias is not None:
            places[at + "self_attn.o_proj.bias"] = layer.o_bias
        if layer.q_norm is not None:
            places[at + "self_attn.q_norm.weight"] = layer.q_norm
            places[at + "self_attn.k_norm.weight"] = layer.k_norm
    return {prefix + name: place for name, place in places.items()}


def _fill(place: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    if place.shape != tensor.shape:
        raise BadWeights(
            f"{name}: shape {tuple(tensor.shape)} in the file, {tuple(place.shape)} by the config"
        )
    place.copy_(tensor)


def _is_ignorable(name: str, model: Transformer, has_head: bool) -> bool:
    """Buffers that old checkpoints carry, and a generator's output matrix that is not used."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return name.endswith("lm_head.weight") and (has_head or model.config.tied_embeddings)


def _listed(label: str, names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{label}{', '.join(names[:4])}{more}" if names else ""


def merge_lora(
    model: Transformer, adapter: dict[str, torch.Tensor], scaling: float, prefix: str
) -> None:
    """Add `scaling * B @ A` to each adapted matrix, in float32 (LoRA, Hu et al. 2021).

    `adapter` holds peft's names: `prefix + "layers.N.self_attn.q_proj.lora_A.weight"`.
    Raises BadWeights for a name that has no place or a half without its other half.
    """
    places = _places(model, "")
    names = {name.rsplit(".lora_", 1)[0] for name in adapter}
    for name in sorted(names):
        place = places.get("model." + name.removeprefix(prefix) + ".weight")
        halves = [adapter.get(f"{name}.lora_{half}.weight") for half in "AB"]
        if place is None or any(half is None for half in halves):
            raise BadWeights(f"adapter tensor {name!r} has no place in the model or no other half")
        a, b = (half.to(place.device, torch.float32) for half in halves)
        if (b.shape[0], a.shape[1]) != tuple(place.shape) or a.shape[0] != b.shape[1]:
            raise BadWeights(
                f"adapter tensor {name!r}: {tuple(b.shape)} times {tuple(a.shape)} does not fit "
                f"{tuple(place.shape)}"
            )
        place.copy_(place.float() + scaling * (b @ a))
