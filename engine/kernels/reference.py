"""Plain torch twins of the kernels in this folder, for tests: any device, any float dtype.

They read lengths on the host and build the whole score matrix, which the kernels never do.
The sampler's twin is `engine/sampler.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    prefix_len: Tensor,
    length: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotated queries [rows, H, d]; writes the last token's key and value into the pages."""
    _, num_kv_heads, page_size, head_dim = k_pages.shape
    rows, last = len(qkv), int(length) - 1
    heads = qkv.view(rows, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    position = int(prefix_len) + last
    q, k = (_rotate(x, cos[position], sin[position]) for x in (q, k))
    page = table[:rows, last // page_size].long()
    k_pages[page, :, last % page_size] = k
    v_pages[page, :, last % page_size] = v
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    length: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    prefix_len: Tensor,
    scale: float | None = None,
) -> Tensor:
    """One softmax over the prompt and the row's own tokens: [rows, H * d]."""
    rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    num_pages, prompt = -(-int(length) // page_size), int(prefix_len)

    def keys(pages: Tensor, prefix: Tensor) -> Tensor:  # [rows, K, prompt + length, d] float32
        own = pages[table[:rows, :num_pages].long()].transpose(1, 2).flatten(2, 3)
        shared = prefix[None, :, :prompt].expand(rows, -1, -1, -1)
        return torch.cat((shared, own[:, :, : int(length)]), dim=2).float()

    grouped = q.view(rows, num_kv_heads, -1, head_dim).float()
    score = grouped @ keys(k_pages, k_prefix).transpose(2, 3)
    weight = torch.softmax(score * (scale or 1.0 / math.sqrt(head_dim)), dim=-1)
    output = weight @ keys(v_pages, v_prefix)
    return output.reshape(rows, num_heads * head_dim).to(q.dtype)
