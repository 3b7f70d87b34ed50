"""Rotary embedding of one token a row, and its key and value into the paged cache, in one kernel.

Rows move in lockstep: `length` counts a row's own tokens including the one being appended, so the
token lies at slot length - 1 of the row's pages and at position prefix_len + length - 1. Optional
per-head RMSNorm of queries and keys (Qwen3) comes first. Angles and products are float32, rounded
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import early_start


@triton.jit
def _rope_append_kernel(
    qkv,
    cos,
    sin,
    prefix_len,
    length,
    k_pages,
    v_pages,
    table,
    table_stride,
    q_norm,
    k_norm,
    eps,
    q_out,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
    HEADS: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # queries, then keys, values
    i = tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = D // 2
    inside = (i < HALF) & (head < H + 2 * K)
    at = qkv + row * (H + 2 * K) * D + head * D + i
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)

    last = tl.load(length) - 1
    angle_at = (tl.load(prefix_len) + last).to(tl.int64) * HALF + i
    rotated = head < H + K
    c = tl.where(rotated, tl.load(cos + angle_at, mask=i < HALF, other=1.0), 1.0)
    s = tl.where(rotated, tl.load(sin + angle_at, mask=i < HALF, other=0.0), 0.0)
    if NORM:
        is_query = head < H
        mean_square = tl.sum(low * low + high * high, axis=1)[:, None] / D
        scale = tl.rsqrt(mean_square + eps)
        dtype = qkv.dtype.element_ty
        w_low_q = tl.load(q_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        w_low_k = tl.load(k_norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        w_high_q = tl.load(q_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        w_high_k = tl.load(k_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        normed_low = (low * scale).to(dtype).to(tl.float32) * tl.where(is_query, w_low_q, w_low_k)
        normed_high = (high * scale).to(dtype).to(tl.float32) * tl.where(
            is_query, w_high_q, w_high_k
        )
        low = tl.where(rotated, normed_low.to(dtype).to(tl.float32), low)
        high = tl.where(rotated, normed_high.to(dtype).to(tl.float32), high)

    new_low = (low * c - high * s).to(q_out.dtype.element_ty)
    new_high = (high * c + low * s).to(q_out.dtype.element_ty)

    q_at = q_out + row * H * D + head * D + i
    tl.store(q_at, new_low, mask=inside & (head < H))
    tl.store(q_at + HALF, new_high, mask=inside & (head < H))
    page = tl.load(table + row * table_stride + last // PAGE).to(tl.int64)
    slot = page * (K * PAGE * D) + (last % PAGE) * D + i
    is_key = inside & (head >= H) & (head < H + K)
    k_at = k_pages + slot + (head - H) * (PAGE * D)
    tl.store(k_at, new_low, mask=is_key)
    tl.store(k_at + HALF, new_high, mask=is_key)
    is_value = inside & (head >= H + K)
    v_at = v_pages + slot + (head - H - K) * (PAGE * D)
    tl.store(v_at, new_low, mask=is_value)
    tl.store(v_at + HALF, new_high, mask=is_value)


def rope_append(
    qkv: Tensor,  # [rows, (H + 2K) * d]
    cos: Tensor,  # [max_positions, d / 2] float32
    sin: Tensor,
    prefix_len: Tensor,  # int32 device scalar
    length: Tensor,  # int32 device scalar, this token included
    k_pages: Tensor,  # [num_pages, K, page_size, d] of one layer
    v_pages: Tensor,
    table: Tensor,  # [max_rows, max_pages] int32
    q_norm: Tensor | None = None,  # [d]
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Rotated queries [rows, H, d]; the rotated key and the value go into the pages."""
    _, num_kv_heads, page_size, head_dim = k_pages.shape
    assert k_pages.is_contiguous() and v_pages.is_contiguous(), "pages must be contiguous"
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    rows, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    if out is None:
        out = torch.empty((rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    heads = 16
    _rope_append_kernel[(rows, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv,
        cos,
        sin,
        prefix_len,
        length,
        k_pages,
        v_pages,
        table,
        table.stride(0),
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        out,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        PAGE=page_size,
        NORM=q_norm is not None,
        HEADS=heads,
        num_warps=4,
        **early_start(qkv.device, rows),
    )
    return out
