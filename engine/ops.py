"""The arithmetic between the matrices, in plain PyTorch: the slow twin that runs everywhere.

`Ops` is the whole interface of a backend: two norms, an activation, and attention in two shapes.
A backend rotates queries and keys, stores keys and values, and attends. `TorchOps` is right on any
device and dtype; engine/triton_ops.py is the fast path on a GPU and is tested against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from engine.rope import rotate

if TYPE_CHECKING:
    from engine.decode_state import DecodeState
    from engine.model import Transformer
    from engine.packing import Packing


class Ops(Protocol):
    """What a backend computes. Shapes: R rows or T packed tokens."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place; returns the norm of the sum."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, `[R, 2 * intermediate]` to `[R, intermediate]`."""

    def decode_attention(
        self, model: Transformer, layer: int, qkv: torch.Tensor, state: DecodeState, rows: slice
    ) -> torch.Tensor:
        """Append each row's key and value at `state.length - 1`, attend to prompt and suffix."""

    def packed_attention(
        self, model: Transformer, layer: int, qkv: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        """Append as the packing says; each token attends to its prompt, past and itself."""


class TorchOps:
    """The reference backend."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def decode_attention(
        self, model: Transformer, layer: int, qkv: torch.Tensor, state: DecodeState, rows: slice
    ) -> torch.Tensor:
        cache, length = state.cache, state.host_length
        position = torch.full((len(qkv),), cache.prompt_len + length - 1, device=qkv.device)
        q, k, v = self.split_and_rotate(model, layer, qkv, position)
        column, offset = divmod(length - 1, cache.page_size)
        pages = state.cache.table[rows, : column + 1]
        cache.k[layer][pages[:, column].long(), :, offset] = k
        cache.v[layer][pages[:, column].long(), :, offset] = v
        return _paged_attention(
            q,
            cache.k[layer][pages],
            cache.v[layer][pages],
            cache.prompt_k[layer, :, : cache.prompt_len],
            cache.prompt_v[layer, :, : cache.prompt_len],
            length,
        )

    def packed_attention(
        self, model: Transformer, layer: int, qkv: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        q, k, v = self.split_and_rotate(model, layer, qkv, packing.positions)
        self.store(layer, k, v, packing)
        k_all, v_all = self.gather(layer, k, v, packing)
        return self.varlen_attention(q, k_all, v_all, packing).flatten(1)

    def split_and_rotate(
        self, model: Transformer, layer: int, qkv: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[T, heads, dim]`, k and v `[T, kv_heads, dim]`, normed where the model does so."""
        c, weights = model.config, model.layers[layer]
        qkv = qkv.view(len(qkv), -1, c.head_dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if c.qk_norm:
            q = self.rms_norm(q, weights.q_norm, c.norm_eps)
            k = self.rms_norm(k, weights.k_norm, c.norm_eps)
        cos, sin = model.cos[positions], model.sin[positions]
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> None:
        """Put the new keys and values where the packing says, if anywhere."""
        cache = packing.cache
        if packing.to_prompt:
            end = packing.prompt_len + len(k)
            cache.prompt_k[layer, :, packing.prompt_len : end] = k.transpose(0, 1)
            cache.prompt_v[layer, :, packing.prompt_len : end] = v.transpose(0, 1)
        if packing.new_slots is not None:
            pages, offsets = packing.new_slots
            cache.k[layer][pages, :, offsets] = k
            cache.v[layer][pages, :, offsets] = v

    def gather(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, packing: Packing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the sequences see, packed."""
        cache = packing.cache
        if packing.keys is None:
            return k, v
        return (
            _gather(cache.prompt_k[layer], cache.k[layer], k, packing),
            _gather(cache.prompt_v[layer], cache.v[layer], v, packing),
        )

    def varlen_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        """Causal attention of each sequence by itself, its last query aligned to its last key."""
        out = torch.empty_like(q)
        q_start = k_start = 0
        for new, keys in zip(packing.new_lens, packing.key_lens, strict=True):
            queries, seen = slice(q_start, q_start + new), slice(k_start, k_start + keys)
            out[queries] = _causal(q[queries], k[seen], v[seen])
            q_start, k_start = queries.stop, seen.stop
        return out


def _gather(
    prompt: torch.Tensor, pool: torch.Tensor, new: torch.Tensor, packing: Packing
) -> torch.Tensor:
    """Keys (or values) `[total keys, kv_heads, dim]` in the order of the sequences."""
    parts = [prompt[:, : packing.prompt_len].transpose(0, 1)]
    if packing.past_slots is not None:
        pages, offsets = packing.past_slots
        parts.append(pool[pages, :, offsets])
    return torch.cat((*parts, new))[packing.keys]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence: q `[new, heads, dim]`, k and v `[keys, kv_heads, dim]`."""
    new, keys = len(q), len(k)
    mask = None
    if new != keys:
        mask = torch.ones(new, keys, dtype=torch.bool, device=q.device).tril(keys - new)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _paged_attention(
    q: torch.Tensor,  # [rows, heads, dim]
    k: torch.Tensor,  # [rows, pages, kv_heads, page_size, dim]
    v: torch.Tensor,
    prompt_k: torch.Tensor,  # [kv_heads, prompt, dim]
    prompt_v: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """One query a row over the shared prompt and the row's pages: one softmax over both."""
    rows, heads, dim = q.shape
    num_pages, kv_heads, page_size = k.shape[1:4]
    group = heads // kv_heads
    q = q.view(rows, kv_heads, group, dim) * dim**-0.5
    stacked = q.transpose(0, 1).reshape(kv_heads, rows * group, dim)
    prompt_scores = (stacked @ prompt_k.transpose(1, 2)).view(kv_heads, rows, group, -1)
    own_scores = q[:, None] @ k.transpose(-1, -2)  # [rows, pages, kv_heads, group, page_size]
    own_scores = own_scores.permute(0, 2, 3, 1, 4).flatten(3)[..., :length]
    scores = torch.cat((prompt_scores.transpose(0, 1), own_scores), dim=-1)
    probs = scores.float().softmax(-1).to(q.dtype)
    prompt_probs, own_probs = probs.split((prompt_k.shape[1], length), dim=-1)
    out = prompt_probs.transpose(0, 1).reshape(kv_heads, rows * group, -1) @ prompt_v
    out = out.view(kv_heads, rows, group, dim).transpose(0, 1)
    padding = (0, num_pages * page_size - length)
    own_probs = torch.nn.functional.pad(own_probs, padding)
    own_probs = own_probs.view(rows, kv_heads, group, num_pages, page_size).permute(0, 3, 1, 2, 4)
    return (out + (own_probs @ v).sum(1)).reshape(rows, heads * dim)
