"""Two-level decode attention: all rows on the one shared prompt, then each row on its own pages.

The prefix kernel stacks the queries of all rows against the prompt's keys, which are read once for
a block of queries instead of once a row. The suffix kernel streams each row's pages, and starts its
online softmax from the prefix kernel's states, so that merging the levels costs no pass of its own.
With few rows the own keys are split over more programs (`suffix_splits`), both levels run at once
on two streams, and a third kernel combines the states.
NOTE: a plan fixes the launch for a number of rows; lengths are read on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.kernels.attention_kernels import combine_kernel, prefix_kernel, suffix_kernel
from engine.kernels.launch import early_start

LOG2_E = math.log2(math.e)
MAX_PREFIX_SPLITS = 16
MAX_SUFFIX_SPLITS = 32
LONG_PROMPT = 1024  # tokens from which larger blocks of queries pay
MIN_SPLIT_BLOCKS = 4  # of keys in a part: a short row uses fewer parts than its plan has
MIN_DOT = 16  # sides of tl.dot: a group of queries and a head are padded to it


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
    def at_once(self) -> bool:
        """The prefix kernel runs beside the suffix kernel."""
        return self.prefix_splits > 0 and self.suffix_splits > 1

    @property
    def num_states(self) -> int:
        """Partial softmax states of each query that pass through memory."""
        return self.prefix_splits + (self.suffix_splits if self.suffix_splits > 1 else 0)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """What passes between the kernels; one serves all layers, one after the other."""

    output: Tensor  # [states * rows * H * d] in the data's dtype
    lse: Tensor  # [states * rows * H] float32, base 2
    side_stream: torch.cuda.Stream | None  # where few rows' prefix kernel runs; None on a CPU

    def serves(self, plan: AttentionPlan, rows: int, num_heads: int) -> bool:
        return self.lse.numel() >= plan.num_states * rows * num_heads


def plan_attention(
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    prompt_tokens: int,
    num_multiprocessors: int = 132,
) -> AttentionPlan:
    """The launch for this many rows; `prompt_tokens` is the longest prompt to expect (or 0)."""
    wide = dtype == torch.float32  # twice the bytes in shared memory, no matrix units
    queries = rows * (num_heads // num_kv_heads)
    large = queries > 64 and prompt_tokens >= LONG_PROMPT
    block_m = 16 if queries <= 16 or wide else 128 if large else 64
    block_n = 64 if not wide else 32
    programs = triton.cdiv(queries, block_m) * num_kv_heads
    blocks = triton.cdiv(prompt_tokens, block_n)
    suffix_splits = max(1, min(num_multiprocessors // (rows * num_kv_heads), MAX_SUFFIX_SPLITS))
    return AttentionPlan(
        prefix_splits=min(max(1, num_multiprocessors // programs), blocks, MAX_PREFIX_SPLITS),
        prefix_block_m=block_m,
        prefix_block_n=block_n,
        prefix_warps=8 if block_m == 128 else 4,
        prefix_stages=3 if not wide else 1,
        suffix_splits=suffix_splits,
        suffix_block_n=block_n,
        suffix_warps=4,
        suffix_stages=3 if not wide else 1,
    )


def make_workspace(
    plans: dict[int, AttentionPlan],  # by number of rows
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> AttentionWorkspace:
    """Memory for any of these launches, one at a time."""
    states = num_heads * max(rows * plan.num_states for rows, plan in plans.items())
    on_gpu = torch.device(device).type == "cuda"
    return AttentionWorkspace(
        torch.empty(states * head_dim, dtype=dtype, device=device),
        torch.empty(states, dtype=torch.float32, device=device),
        torch.cuda.Stream(device, priority=-1) if on_gpu else None,
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
    assert workspace.serves(plan, rows, num_heads), "workspace too small"
    if out is None:
        out = torch.empty((rows, num_heads * head_dim), dtype=q.dtype, device=q.device)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    prefix = (q, k_prefix, v_prefix, prefix_len, plan, workspace, scale)
    suffix = (q, k_pages, v_pages, table, length, plan, workspace, out, scale)
    if plan.at_once and workspace.side_stream is not None:
        main, side = torch.cuda.current_stream(), workspace.side_stream
        side.wait_stream(main)
        with torch.cuda.stream(side):
            prefix_attention(*prefix)
        suffix_attention(*suffix)
        main.wait_stream(side)
    else:
        if plan.prefix_splits:
            prefix_attention(*prefix)
        suffix_attention(*suffix)
    if plan.suffix_splits > 1:
        combine_parts(q, length, plan, workspace, out)
    return out


def prefix_attention(
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
        D_PAD=max(MIN_DOT, triton.next_power_of_2(head_dim)),
        BLOCK_M=plan.prefix_block_m,
        BLOCK_N=plan.prefix_block_n,
        SPLITS=plan.prefix_splits,
        num_warps=plan.prefix_warps,
        num_stages=plan.prefix_stages,
        **early_start(q.device, rows, not plan.at_once),
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
    """Second level: each row on its pages, into `out`; where rows are split, into states."""
    rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    assert q.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
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
        D_PAD=max(MIN_DOT, triton.next_power_of_2(head_dim)),
        PAGE=page_size,
        BLOCK_M=MIN_DOT,
        BLOCK_N=plan.suffix_block_n,
        PREFIX_STATES=plan.prefix_splits,
        SPLITS=plan.suffix_splits,
        MIN_BLOCKS=MIN_SPLIT_BLOCKS,
        num_warps=plan.suffix_warps,
        num_stages=plan.suffix_stages,
        **early_start(q.device, rows, not plan.at_once),
    )


def combine_parts(
    q: Tensor, length: Tensor, plan: AttentionPlan, workspace: AttentionWorkspace, out: Tensor
) -> None:
    """Merge the prompt's states and those of a row's split keys into `out`."""
    rows, num_heads, head_dim = q.shape
    combine_kernel[(rows * num_heads,)](
        length,
        workspace.output,
        workspace.lse,
        out,
        rows,
        H=num_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_N=plan.suffix_block_n,
        PREFIX_STATES=plan.prefix_splits,
        SPLITS=plan.suffix_splits,
        MIN_BLOCKS=MIN_SPLIT_BLOCKS,
        STATES_PAD=triton.next_power_of_2(plan.num_states),
        num_warps=2,
        **early_start(q.device, rows, not plan.at_once),
    )
