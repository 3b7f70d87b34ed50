"""What a model is, read from its config.json alone.

Everything the engine does follows from these fields, never from a model's name. An architecture
that is not listed here is an error that lists those that are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3")


class UnsupportedModel(ValueError):
    """The model's config asks for something that the engine does not compute."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; `kind` other than "default" rescales the frequencies."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer with grouped-query attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModel(f"config.json: {name} must be a whole number, got {value!r}")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim must be even to be rotated, got {self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_layer_params(self) -> int:
        """Parameters of the layers' matrices: what a forward pass multiplies with, per token."""
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, matrices only (norms and biases are negligible)."""
        tables = 1 if self.tied_embeddings else 2
        return self.num_layer_params + tables * self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values that one token of one row occupies over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder/config.json`. Raises UnsupportedModel or FileNotFoundError."""
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, raw: dict) -> ModelConfig:
        """Build from a config.json's content (transformers 4 and 5 layouts)."""
        try:
            return cls._from_dict(raw)
        except (KeyError, TypeError, AttributeError) as error:
            raise UnsupportedModel(f"config.json lacks or misstates a size: {error}") from error

    @classmethod
    def _from_dict(cls, raw: dict) -> ModelConfig:
        architecture = raw.get("model_type")
        if architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"architecture {architecture!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        _refuse_unsupported_switches(raw)
        num_heads = raw["num_attention_heads"]
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=_head_dim(raw, architecture),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=_rope(raw),
            max_positions=_max_positions(raw),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=architecture != "qwen2" and attention_bias,
            qk_norm=architecture == "qwen3",
        )


def read_config(folder: Path) -> dict:
    """The raw config.json of a model folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no config.json; a model folder needs one")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _head_dim(raw: dict, architecture: str) -> int:
    if raw.get("head_dim"):
        return raw["head_dim"]
    return 128 if architecture == "qwen3" else raw["hidden_size"] // raw["num_attention_heads"]


def _refuse_unsupported_switches(raw: dict) -> None:
    if raw.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias true is not supported")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantised checkpoints are not supported; use the original weights")


def _max_positions(raw: dict) -> int:
    """A sliding window bounds the length: up to it, windowed and full attention are the same."""
    positions = raw.get("max_position_embeddings", 2048)
    windowed = raw.get("use_sliding_window", raw.get("model_type") == "mistral")
    window = raw.get("sliding_window") if windowed else None
    return min(positions, window) if window else positions


def _rope(raw: dict) -> RopeConfig:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    part = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {part} is not supported; only 1 is")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling["factor"])
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_positions=scaling["original_max_position_embeddings"],
    )
