"""Two-level decode attention: all rows on the one shared prompt, then each row on its own pages.

The prefix kernel stacks the queries of all rows against the prompt's keys, which are read once
for a block of queries instead of once a row. Its states (normalised output and base-2 log-sum-exp,
one for each of `prefix_splits` parts of the prompt) are where the suffix kernel's online softmax
starts, so merging the levels costs no pass of its own. With few rows the keys are split over more
programs (`suffix_splits`), and a third kernel combines the states.
NOTE: a plan fixes the launch for a number of rows; lengths are read on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
MIN_DOT_ROWS = 16  # of tl.dot: a group of queries is padded to it


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the kernels are launched for one number of rows."""

    prefix_splits: int
    prefix_block_m: int
    prefix_block_n: int
    prefix_warps: int
    prefix_stages: int
    suffix_splits: int
    suffix_block_n: int
    suffix_warps: int
    suffix_stages: int

    @property
    def num_states(self) -> int:
        """Partial softmax states of each query that pass through memory."""
        return self.prefix_splits + (self.suffix_splits if self.suffix_splits > 1 else 0)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """The states between the kernels; one serves all layers, and all plans that need no more."""

    output: Tensor  # [states, rows, H, d] float32
    lse: Tensor  # [states, rows, H] float32, base 2


@triton.jit(do_not_specialize=["num_rows"])
def _prefix_kernel(
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
def _suffix_kernel(
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
def _combine_kernel(
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


def plan_attention(
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    prompt_tokens: int,
    num_multiprocessors: int = 132,
) -> AttentionPlan:
    """The launch for this many rows; `prompt_tokens` is the longest prompt to expect (or 0)."""
    wide = dtype == torch.float32  # twice the bytes in shared memory, no matrix units
    queries = rows * (num_heads // num_kv_heads)
    block_m = 128 if queries > 64 and not wide else 64 if queries > 16 else 16
    block_n = 64 if not wide else 32
    programs = triton.cdiv(queries, block_m) * num_kv_heads
    blocks = max(1, triton.cdiv(prompt_tokens, block_n))
    prefix_splits = max(1, min(num_multiprocessors // programs, blocks, 16))
    suffix_programs = rows * num_kv_heads
    wanted = 4 * num_multiprocessors
    suffix_splits = 1 if suffix_programs >= wanted else triton.cdiv(2 * wanted, suffix_programs)
    return AttentionPlan(
        prefix_splits=prefix_splits if prompt_tokens else 0,
        prefix_block_m=block_m,
        prefix_block_n=block_n,
        prefix_warps=8 if block_m == 128 else 4,
        prefix_stages=3 if not wide else 1,
        suffix_splits=min(suffix_splits, 32),
        suffix_block_n=min(page_size, 64 if not wide else 32),
        suffix_warps=4,
        suffix_stages=3 if not wide else 1,
    )


def make_workspace(
    plan: AttentionPlan, rows: int, num_heads: int, head_dim: int, device: torch.device | str
) -> AttentionWorkspace:
    """Memory for the states of one attention call."""
    states = plan.num_states
    return AttentionWorkspace(
        torch.empty((states, rows, num_heads, head_dim), dtype=torch.float32, device=device),
        torch.empty((states, rows, num_heads), dtype=torch.float32, device=device),
    )


def decode_attention(
    q: Tensor,  # [rows, H, d]
    k_pages: Tensor,  # [num_pages, K, page_size, d] of one layer
    v_pages: Tensor,
    table: Tensor,  # [max_rows, max_pages] int32
    length: Tensor,  # int32 device scalar: own tokens of every row
    k_prefix: Tensor,  # [K, max_prompt, d] of one layer
    v_prefix: Tensor,
    prefix_len: Tensor,  # int32 device scalar
    plan: AttentionPlan,
    workspace: AttentionWorkspace,
    out: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of one new token a row over the prompt and the row's pages: [rows, H * d]."""
    rows, num_heads, head_dim = q.shape
    assert workspace.lse.numel() >= plan.num_states * rows * num_heads, "workspace too small"
    if out is None:
        out = torch.empty((rows, num_heads * head_dim), dtype=q.dtype, device=q.device)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    if plan.prefix_splits:
        prefix_states(q, k_prefix, v_prefix, prefix_len, plan, workspace, scale)
    suffix_attention(q, k_pages, v_pages, table, length, plan, workspace, out, scale)
    return out


def prefix_states(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    prefix_len: Tensor,
    plan: AttentionPlan,
    workspace: AttentionWorkspace,
    scale: float,
) -> None:
    """First level: the states of all rows on the prompt, into the workspace."""
    rows, num_heads, head_dim = q.shape
    num_kv_heads = k_prefix.shape[0]
    assert q.is_contiguous(), "queries must be contiguous"
    assert k_prefix.stride(1) == head_dim and k_prefix.stride() == v_prefix.stride()
    group = num_heads // num_kv_heads
    grid = (triton.cdiv(rows * group, plan.prefix_block_m), num_kv_heads, plan.prefix_splits)
    _prefix_kernel[grid](
        q,
        k_prefix,
        v_prefix,
        prefix_len,
        workspace.output,
        workspace.lse,
        rows,
        k_prefix.stride(0),
        scale * LOG2_E,
        H=num_heads,
        G=group,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_M=plan.prefix_block_m,
        BLOCK_N=plan.prefix_block_n,
        SPLITS=plan.prefix_splits,
        num_warps=plan.prefix_warps,
        num_stages=plan.prefix_stages,
    )


def suffix_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    length: Tensor,
    plan: AttentionPlan,
    workspace: AttentionWorkspace,
    out: Tensor,
    scale: float,
) -> None:
    """Second level: each row on its pages, merged with the states of the first."""
    rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    assert q.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
    assert page_size % plan.suffix_block_n == 0, "a block of keys must not cross pages"
    d_pad = triton.next_power_of_2(head_dim)
    _suffix_kernel[(rows * num_kv_heads, plan.suffix_splits)](
        q,
        k_pages,
        v_pages,
        table,
        table.stride(0),
        length,
        workspace.output,
        workspace.lse,
        out,
        rows,
        scale * LOG2_E,
        K=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=head_dim,
        D_PAD=d_pad,
        PAGE=page_size,
        BLOCK_M=MIN_DOT_ROWS,
        BLOCK_N=plan.suffix_block_n,
        PREFIX_STATES=plan.prefix_splits,
        SPLITS=plan.suffix_splits,
        num_warps=plan.suffix_warps,
        num_stages=plan.suffix_stages,
    )
    if plan.suffix_splits > 1:
        _combine_kernel[(rows * num_heads,)](
            workspace.output,
            workspace.lse,
            out,
            rows,
            H=num_heads,
            D=head_dim,
            D_PAD=d_pad,
            STATES=plan.num_states,
            STATES_PAD=triton.next_power_of_2(plan.num_states),
            num_warps=2,
        )
