"""The transformer: weights and its two forward passes.

`decode` computes one token for each of many rows in lockstep. `extend` computes packed sequences of
any lengths, each after the shared prompt and its own cached past; prefill and reading are the same
pass. Both return hidden states after the final norm. Neither knows how attention is computed: that
is the business of `ops` (engine/ops.py, engine/triton_ops.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from engine.config import ModelConfig
from engine.rope import rope_tables

if TYPE_CHECKING:
    from engine.decode_state import DecodeState
    from engine.ops import Ops
    from engine.packing import Packing


@dataclass(slots=True)
class Layer:
    """One block's weights; q, k, v lie in one matrix, gate and up in another."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    o: torch.Tensor  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


class Transformer:
    """A decoder-only model on one device in one dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        c = config
        self.embed = empty(c.vocab_size, c.hidden_size)
        self.lm_head = self.embed if c.tied_embeddings else empty(c.vocab_size, c.hidden_size)
        self.norm = empty(c.hidden_size)
        self.layers = [_empty_layer(c, empty) for _ in range(c.num_layers)]
        self.cos, self.sin = rope_tables(c.rope, c.head_dim, c.max_positions, device)

    @property
    def weight_bytes(self) -> int:
        tensors = {id(t): t for t in self._tensors()}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def _tensors(self) -> list[torch.Tensor]:
        values = (getattr(layer, name) for layer in self.layers for name in Layer.__slots__)
        layers = [tensor for tensor in values if tensor is not None]
        return [self.embed, self.lm_head, self.norm, *layers]

    def randomise(self, seed: int, scale: float = 0.02) -> Transformer:
        """Fill with random weights (benchmarks and shape tests only). Returns self."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in self._tensors():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, scale, generator=generator)
        return self

    def decode(self, ops: Ops, state: DecodeState, rows: slice) -> torch.Tensor:
        """Append one token a row and return `[rows, hidden]`.

        `state.tokens[rows]` are the tokens to append; their slots are `state.length - 1`.
        """
        x = self.embed[state.tokens[rows]]
        return self._blocks(x, ops, lambda i, q: ops.decode_attention(self, i, q, state, rows))

    def extend(self, ops: Ops, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Append packed `tokens [total]` as `packing` lays out and return `[total, hidden]`."""
        x = self.embed[tokens]
        return self._blocks(x, ops, lambda i, q: ops.packed_attention(self, i, q, packing))

    def _blocks(self, x: torch.Tensor, ops: Ops, attend) -> torch.Tensor:
        """All layers; `attend(layer index, qkv)` rotates, appends to the cache and attends."""
        residual = x
        h = ops.rms_norm(x, self.layers[0].input_norm, self.config.norm_eps)
        for i, layer in enumerate(self.layers):
            attended = attend(i, linear(h, layer.qkv, layer.qkv_bias))
            x = linear(attended, layer.o, layer.o_bias)
            h = ops.add_rms_norm(x, residual, layer.post_norm, self.config.norm_eps)
            x = linear(ops.silu_mul(linear(h, layer.gate_up)), layer.down)
            last = i + 1 == len(self.layers)
            next_norm = self.norm if last else self.layers[i + 1].input_norm
            h = ops.add_rms_norm(x, residual, next_norm, self.config.norm_eps)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` to `[tokens, vocab]` in the model's dtype."""
        return linear(hidden, self.lm_head)


def _empty_layer(c: ModelConfig, empty) -> Layer:
    return Layer(
        input_norm=empty(c.hidden_size),
        qkv=empty(c.qkv_size, c.hidden_size),
        qkv_bias=empty(c.qkv_size) if c.qkv_bias else None,
        q_norm=empty(c.head_dim) if c.qk_norm else None,
        k_norm=empty(c.head_dim) if c.qk_norm else None,
        o=empty(c.hidden_size, c.num_heads * c.head_dim),
        o_bias=empty(c.hidden_size) if c.o_bias else None,
        post_norm=empty(c.hidden_size),
        gate_up=empty(2 * c.intermediate_size, c.hidden_size),
        down=empty(c.hidden_size, c.intermediate_size),
    )
