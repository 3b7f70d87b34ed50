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
from torch import Tensor

from engine.kernels.attention_kernels import combine_kernel, prefix_kernel, suffix_kernel

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
    prefix_kernel[grid](
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
    suffix_kernel[(rows * num_kv_heads, plan.suffix_splits)](
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
        combine_kernel[(rows * num_heads,)](
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
