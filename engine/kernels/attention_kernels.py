"""The Triton programs of `attention.py`, which explains how they fit together.

A state is one part's softmax: its output, normalised, and the base-2 logarithm of its sum (-inf for
a part without keys). Scores are in base 2 throughout: `scale` carries the factor log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _attend(query, key, value, valid, scale, best, total, output, MASKED: tl.constexpr):
    """One block of keys into the online softmax of each query."""
    score = tl.dot(query, key, input_precision="ieee")
    if MASKED:
        score = tl.where(valid[None, :], score, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weight, axis=1)
    output = output * shrink[:, None]
    output = tl.dot(weight.to(value.dtype), value, output, input_precision="ieee")
    return new_best, total, output


@triton.jit
def _finish(best, total, output):
    """The state of an online softmax: log-sum-exp and normalised output."""
    some = total > 0
    lse = tl.where(some, best + tl.log2(total), float("-inf"))
    return lse, output / tl.where(some, total, 1.0)[:, None]


@triton.jit
def _merge(state_output, state_lse, at, inside, d, stride, D: tl.constexpr, NUM: tl.constexpr):
    """An online softmax that has seen parts 0 to NUM - 1.

    `at` counts queries, and `stride` is the number of queries in a part.
    """
    best = tl.full([at.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([at.shape[0]], tl.float32)
    output = tl.zeros([at.shape[0], d.shape[0]], tl.float32)
    for part in tl.static_range(NUM):
        part_at = part * stride + at
        lse = tl.load(state_lse + part_at, mask=inside, other=float("-inf"))
        part_output = tl.load(
            state_output + part_at[:, None] * D + d[None, :],
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        new_best = tl.maximum(best, lse)
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, share = tl.exp2(best - safe_best), tl.exp2(lse - safe_best)
        total = total * shrink + share
        output = output * shrink[:, None] + part_output * share[:, None]
        best = new_best
    return best, total, output


@triton.jit(do_not_specialize=["num_rows"])
def prefix_kernel(
    q,
    k_prefix,
    v_prefix,
    prefix_len,
    state_output,
    state_lse,
    num_rows,
    head_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = (m // G).to(tl.int64), kv_head * G + m % G
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    at, inside = row * H + head, row < num_rows
    q_at = at[:, None] * D + d[None, :]
    q_inside = inside[:, None] & (d < D)[None, :]
    query = tl.load(q + q_at, mask=q_inside, other=0.0)

    keys = tl.load(prefix_len)
    per_split = tl.cdiv(tl.cdiv(keys, BLOCK_N), SPLITS) * BLOCK_N
    start = split * per_split
    end = tl.minimum(start + per_split, keys)
    whole_end = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    k_at = k_prefix + kv_head.to(tl.int64) * head_stride + n[None, :] * D + d[:, None]
    v_at = v_prefix + kv_head.to(tl.int64) * head_stride + n[:, None] * D + d[None, :]
    for first in range(start, whole_end, BLOCK_N):
        if D == D_PAD:
            key = tl.load(k_at + first * D)
            value = tl.load(v_at + first * D)
        else:
            key = tl.load(k_at + first * D, mask=(d < D)[:, None], other=0.0)
            value = tl.load(v_at + first * D, mask=(d < D)[None, :], other=0.0)
        best, total, output = _attend(query, key, value, n, scale, best, total, output, False)
    if whole_end < end:
        valid = whole_end + n < end
        key_inside, value_inside = (
            valid[None, :] & (d < D)[:, None],
            valid[:, None] & (d < D)[None, :],
        )
        key = tl.load(k_at + whole_end * D, mask=key_inside, other=0.0)
        value = tl.load(v_at + whole_end * D, mask=value_inside, other=0.0)
        best, total, output = _attend(query, key, value, valid, scale, best, total, output, True)

    lse, output = _finish(best, total, output)
    stride = num_rows.to(tl.int64) * H
    part_at = split * stride
    tl.store(
        state_output + part_at * D + q_at,
        output.to(state_output.dtype.element_ty),
        mask=q_inside,
    )
    tl.store(state_lse + part_at + at, lse, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def suffix_kernel(
    q,
    k_pages,
    v_pages,
    table,
    table_stride,
    length,
    state_output,
    state_lse,
    out,
    num_rows,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFIX_STATES: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    H: tl.constexpr = K * G
    kv_head = tl.program_id(0) % K
    row = (tl.program_id(0) // K).to(tl.int64)
    split = tl.program_id(1)
    g = tl.arange(0, BLOCK_M)  # the group's queries, padded to the matrix unit's 16
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    at, inside = row * H + kv_head * G + g, g < G
    q_at = at[:, None] * D + d[None, :]
    q_inside = inside[:, None] & (d < D)[None, :]
    stride = num_rows.to(tl.int64) * H

    keys = tl.load(length)
    start = 0
    end = keys
    if SPLITS > 1:
        per_split = tl.maximum(tl.cdiv(tl.cdiv(keys, BLOCK_N), SPLITS), MIN_BLOCKS) * BLOCK_N
        start = split * per_split
        end = tl.minimum(start + per_split, keys)
        if (start >= end) & (split > 0):
            return  # the combining kernel knows which parts are empty
    query = tl.load(q + q_at, mask=q_inside, other=0.0)

    MERGED: tl.constexpr = PREFIX_STATES if SPLITS == 1 else 0
    best, total, output = _merge(state_output, state_lse, at, inside, d, stride, D, MERGED)

    row_table = table + row * table_stride
    k_at = k_pages + kv_head * (PAGE * D) + d[:, None]
    v_at = v_pages + kv_head * (PAGE * D) + d[None, :]
    last = tl.maximum(end - 1, 0)
    page = tl.load(row_table + tl.minimum(start + n, last) // PAGE)
    for first in range(start, end, BLOCK_N):
        slot = page.to(tl.int64) * (K * PAGE * D) + (first + n) % PAGE * D
        # The next block's page numbers are fetched one block ahead: as loads that the keys' load
        # depends on, they would take half of the pipeline's stages for themselves.
        page = tl.load(row_table + tl.minimum(first + BLOCK_N + n, last) // PAGE)
        valid = first + n < end
        key = tl.load(k_at + slot[None, :], mask=valid[None, :] & (d < D)[:, None], other=0.0)
        value = tl.load(v_at + slot[:, None], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        best, total, output = _attend(query, key, value, valid, scale, best, total, output, True)

    lse, output = _finish(best, total, output)
    if SPLITS == 1:
        tl.store(out + q_at, output.to(out.dtype.element_ty), mask=q_inside)
    else:
        part_at = (PREFIX_STATES + split) * stride
        state = output.to(state_output.dtype.element_ty)
        tl.store(state_output + part_at * D + q_at, state, mask=q_inside)
        tl.store(state_lse + part_at + at, lse, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    length,
    state_output,
    state_lse,
    out,
    num_rows,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFIX_STATES: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    STATES_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    query = tl.program_id(0).to(tl.int64)  # row * H + head
    part = tl.arange(0, STATES_PAD)
    d = tl.arange(0, D_PAD)
    blocks = tl.cdiv(tl.load(length), BLOCK_N)
    used = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, SPLITS), MIN_BLOCKS))
    there = part < PREFIX_STATES + tl.maximum(used, 1)
    at = part.to(tl.int64) * num_rows * H + query
    lse = tl.load(state_lse + at, mask=there, other=float("-inf"))
    share = tl.exp2(lse - tl.max(lse, axis=0))
    inside = there[:, None] & (d < D)[None, :]
    output = tl.load(state_output + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    merged = tl.sum(output.to(tl.float32) * share[:, None], axis=0) / tl.sum(share, axis=0)
    tl.store(out + query * D + d, merged.to(out.dtype.element_ty), mask=d < D)
