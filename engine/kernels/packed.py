"""Kernels around the attention of packed sequences: rotation in place, and gathering keys.

`gather_keys` lays out what each sequence sees (the shared prompt, its cached past, its new tokens)
back to back, reading each key and value once from where it lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from engine.packing import Packing


@triton.jit
def _rotate_kernel(x, cos, sin, positions, stride, D: tl.constexpr, HALF_PAD: tl.constexpr,
                   NUM_HEADS: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, HALF_PAD)[None, :]
    at = tl.load(positions + token) * HALF + i
    c = tl.load(cos + at, mask=i < HALF, other=0.0)
    s = tl.load(sin + at, mask=i < HALF, other=0.0)
    for first in range(0, NUM_HEADS, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (i < HALF) & (head < NUM_HEADS)
        place = x + token * stride + head * D + i
        low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (low * c - high * s).to(x.dtype.element_ty), mask=inside)
        tl.store(place + HALF, (high * c + low * s).to(x.dtype.element_ty), mask=inside)


def rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate `x [tokens, heads, dim]` (heads and dim contiguous) at `positions [tokens]` int64."""
    tokens, heads, dim = x.shape
    assert x.stride(1) == dim and x.stride(2) == 1, "heads must lie side by side"
    _rotate_kernel[(tokens,)](
        x,
        cos,
        sin,
        positions,
        x.stride(0),
        D=dim,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        NUM_HEADS=heads,
        HEADS=min(8, triton.next_power_of_2(heads)),
        num_warps=4,
    )


@triton.jit
def _gather_kernel(
    keys,
    prompt_k,
    prompt_v,
    pages_k,
    pages_v,
    new_k,
    new_v,
    past_pages,
    past_offsets,
    out_k,
    out_v,
    prompt_len,
    num_past,
    prompt_stride,
    new_stride_k,
    new_stride_v,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64)
    source = tl.load(keys + out)
    i = tl.arange(0, WIDTH_PAD)
    inside = i < K * D
    head, at = i // D, i % D
    if source < prompt_len:
        place = head * prompt_stride + source * D + at
        k = tl.load(prompt_k + place, mask=inside)
        v = tl.load(prompt_v + place, mask=inside)
    elif source < prompt_len + num_past:
        page = tl.load(past_pages + source - prompt_len)
        offset = tl.load(past_offsets + source - prompt_len)
        place = page * (K * PAGE * D) + head * (PAGE * D) + offset * D + at
        k = tl.load(pages_k + place, mask=inside)
        v = tl.load(pages_v + place, mask=inside)
    else:
        token = source - prompt_len - num_past
        k = tl.load(new_k + token * new_stride_k + i, mask=inside)
        v = tl.load(new_v + token * new_stride_v + i, mask=inside)
    tl.store(out_k + out * (K * D) + i, k, mask=inside)
    tl.store(out_v + out * (K * D) + i, v, mask=inside)


def gather_keys(layer: int, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Keys and values that the packing's sequences see, each `[total keys, kv_heads, dim]`.

    k and v are the new ones, `[tokens, kv_heads, dim]` with heads side by side.
    """
    cache = packing.cache
    _, heads, dim = k.shape
    assert k.stride(1) == dim and v.stride(1) == dim, "heads must lie side by side"
    prompt_k, prompt_v = cache.prompt_k[layer], cache.prompt_v[layer]
    past = packing.past_slots or (packing.keys, packing.keys)  # unused where nothing is cached
    num_past = 0 if packing.past_slots is None else len(past[0])
    shape = (len(packing.keys), heads, dim)
    out_k = torch.empty(shape, dtype=k.dtype, device=k.device)
    out_v = torch.empty(shape, dtype=v.dtype, device=v.device)
    _gather_kernel[(len(packing.keys),)](
        packing.keys,
        prompt_k,
        prompt_v,
        cache.k[layer],
        cache.v[layer],
        k,
        v,
        *past,
        out_k,
        out_v,
        packing.prompt_len,
        num_past,
        prompt_k.stride(0),
        k.stride(0),
        v.stride(0),
        K=heads,
        D=dim,
        PAGE=cache.page_size,
        WIDTH_PAD=triton.next_power_of_2(heads * dim),
        num_warps=4 if heads * dim >= 512 else 2,
    )
    return out_k, out_v
