"""The Triton programs of `attention.py`, which explains how they fit together.

A state is a part's softmax: its output, normalised, and the base-2 logarithm of its sum (-inf for
a part without keys). Scores are in base 2 throughout: `scale` carries the factor log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl


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
):
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = (m // G).to(tl.int64), kv_head * G + m % G
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    q_inside = (row < num_rows)[:, None] & (d < D)[None, :]
    q_at = row[:, None] * (H * D) + head[:, None] * D + d[None, :]
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
        score = tl.dot(query, key, input_precision="ieee")
        new_best = tl.maximum(best, tl.max(score, axis=1) * scale)
        weight = tl.exp2(score * scale - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, axis=1)
        output = output * shrink[:, None]
        output = tl.dot(weight.to(value.dtype), value, output, input_precision="ieee")
        best = new_best
    if whole_end < end:
        k_inside = (whole_end + n < end)[None, :] & (d < D)[:, None]
        v_inside = (whole_end + n < end)[:, None] & (d < D)[None, :]
        key = tl.load(k_at + whole_end * D, mask=k_inside, other=0.0)
        value = tl.load(v_at + whole_end * D, mask=v_inside, other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where((whole_end + n < end)[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp2(score - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, axis=1)
        output = output * shrink[:, None]
        output = tl.dot(weight.to(value.dtype), value, output, input_precision="ieee")
        best = new_best

    some = total > 0
    output = output / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, best + tl.log2(total), float("-inf"))
    state = split.to(tl.int64) * num_rows * H
    tl.store(state_output + state * D + q_at, output, mask=q_inside)
    tl.store(state_lse + state + row * H + head, lse, mask=row < num_rows)


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
):
    H: tl.constexpr = K * G
    kv_head = tl.program_id(0) % K
    row = (tl.program_id(0) // K).to(tl.int64)
    split = tl.program_id(1)
    g = tl.arange(0, BLOCK_M)  # the group's queries, padded to the matrix unit's 16
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    head = kv_head * G + g
    q_inside = (g < G)[:, None] & (d < D)[None, :]
    q_at = row * (H * D) + head[:, None] * D + d[None, :]
    query = tl.load(q + q_at, mask=q_inside, other=0.0)

    keys = tl.load(length)
    start = 0
    end = keys
    if SPLITS > 1:
        per_split = tl.cdiv(tl.cdiv(keys, BLOCK_N), SPLITS) * BLOCK_N
        start = split * per_split
        end = tl.minimum(start + per_split, keys)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if SPLITS == 1:
        for part in tl.static_range(PREFIX_STATES):
            state = part * num_rows.to(tl.int64) * H
            lse_at = state_lse + state + row * H + head
            lse = tl.load(lse_at, mask=g < G, other=float("-inf"))
            part_output = tl.load(state_output + state * D + q_at, mask=q_inside, other=0.0)
            new_best = tl.maximum(best, lse)
            safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
            shrink, share = tl.exp2(best - safe_best), tl.exp2(lse - safe_best)
            total = total * shrink + share
            output = output * shrink[:, None] + part_output * share[:, None]
            best = new_best

    row_table = table + row * table_stride
    k_at = k_pages + kv_head * (PAGE * D) + n[None, :] * D + d[:, None]
    v_at = v_pages + kv_head * (PAGE * D) + n[:, None] * D + d[None, :]
    last_page = tl.maximum(end - 1, 0) // PAGE
    page = tl.load(row_table + start // PAGE)
    for first in range(start, end, BLOCK_N):
        offset = page.to(tl.int64) * (K * PAGE * D) + (first % PAGE) * D
        # The next page's number is fetched one block ahead: as a load that the keys' load depends
        # on, it would take half of the pipeline's stages for itself.
        page = tl.load(row_table + tl.minimum((first + BLOCK_N) // PAGE, last_page))
        valid = first + n < end
        key = tl.load(k_at + offset, mask=valid[None, :] & (d < D)[:, None], other=0.0)
        value = tl.load(v_at + offset, mask=valid[:, None] & (d < D)[None, :], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp2(score - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, axis=1)
        output = output * shrink[:, None]
        output = tl.dot(weight.to(value.dtype), value, output, input_precision="ieee")
        best = new_best

    some = total > 0
    output = output / tl.where(some, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + q_at, output.to(out.dtype.element_ty), mask=q_inside)
    else:
        lse = tl.where(some, best + tl.log2(total), float("-inf"))
        state = (PREFIX_STATES + split) * num_rows.to(tl.int64) * H
        tl.store(state_output + state * D + q_at, output, mask=q_inside)
        tl.store(state_lse + state + row * H + head, lse, mask=g < G)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    state_output,
    state_lse,
    out,
    num_rows,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    STATES: tl.constexpr,
    STATES_PAD: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)  # row * H + head
    part = tl.arange(0, STATES_PAD)
    d = tl.arange(0, D_PAD)
    at = part.to(tl.int64) * num_rows * H + query
    lse = tl.load(state_lse + at, mask=part < STATES, other=float("-inf"))
    share = tl.exp2(lse - tl.max(lse, axis=0))
    inside = (part < STATES)[:, None] & (d < D)[None, :]
    output = tl.load(state_output + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    merged = tl.sum(output * share[:, None], axis=0) / tl.sum(share, axis=0)
    tl.store(out + query * D + d, merged.to(out.dtype.element_ty), mask=d < D)
