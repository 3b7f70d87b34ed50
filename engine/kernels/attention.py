"""Two-level decode attention: all rows on the one shared prompt, then each row on its own pages.

The prefix kernel stacks the queries of all rows against the prompt's keys, which are read once for
a block of queries instead of once a row. The suffix kernel streams each row's pages, and starts its
online softmax from the prefix kernel's states, so that merging the levels costs no pass of its own.
The first is bound by arithmetic and the second by memory: on a GPU both run at once, on two
streams, and whichever part of a query comes last merges it. With few rows the own keys are split
over more programs (`suffix_splits`), and a third kernel combines the states.
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
MAX_PREFIX_SPLITS = 16
MAX_SUFFIX_SPLITS = 32
MIN_MEET_PROMPT = 1024  # tokens: below it the counters cost more than they hide
MIN_SPLIT_BLOCKS = 4  # of keys in a part: a short row uses fewer parts than its plan has
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
    prefix_registers: int  # at most, a thread; 0 leaves it to the compiler
    meet: bool  # both levels at once, merged by the last to arrive

    @property
    def num_states(self) -> int:
        """Partial softmax states of each query that pass through memory."""
        own = self.suffix_splits if self.suffix_splits > 1 or self.meet else 0
        return self.prefix_splits + own


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """What passes between the kernels; one serves all layers, one after the other."""

    output: Tensor  # [states * rows * H * d] in the data's dtype
    lse: Tensor  # [states * rows * H] float32, base 2
    arrivals: Tensor  # [rows * H] int32, 0 between calls
    side_stream: torch.cuda.Stream | None  # where the prefix kernel runs; None on a CPU


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
    block_m = 16 if queries <= 16 or wide else 64 if queries <= 64 else 128
    block_n = 64 if not wide else 32
    programs = triton.cdiv(queries, block_m) * num_kv_heads
    blocks = triton.cdiv(prompt_tokens, block_n)
    suffix_splits = max(1, min(num_multiprocessors // (rows * num_kv_heads), MAX_SUFFIX_SPLITS))
    meet = prompt_tokens >= MIN_MEET_PROMPT and suffix_splits == 1 and head_dim >= 128
    return AttentionPlan(
        prefix_splits=min(max(1, num_multiprocessors // programs), blocks, MAX_PREFIX_SPLITS),
        prefix_block_m=block_m,
        prefix_block_n=block_n,
        prefix_warps=8 if block_m == 128 else 4,
        prefix_stages=3 if not wide else 1,
        suffix_splits=suffix_splits,
        suffix_block_n=min(page_size, block_n),
        suffix_warps=4,
        suffix_stages=3 if not wide else 1,
        prefix_registers=176 if meet else 0,
        meet=meet,
    )


def make_workspace(
    plans: dict[int, AttentionPlan],  # by number of rows
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> AttentionWorkspace:
    """Memory for any of these launches, one at a time."""
    queries = num_heads * max(plans)
    states = num_heads * max(rows * plan.num_states for rows, plan in plans.items())
    on_gpu = torch.device(device).type == "cuda"
    return AttentionWorkspace(
        torch.empty(states * head_dim, dtype=dtype, device=device),
        torch.empty(states, dtype=torch.float32, device=device),
        torch.zeros(queries, dtype=torch.int32, device=device),
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
    assert not plan.meet or plan.suffix_splits == 1, "split rows are merged by a kernel of its own"
    assert workspace.lse.numel() >= plan.num_states * rows * num_heads, "workspace too small"
    assert workspace.arrivals.numel() >= rows * num_heads, "workspace too small"
    if out is None:
        out = torch.empty((rows, num_heads * head_dim), dtype=q.dtype, device=q.device)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    prefix = (q, k_prefix, v_prefix, prefix_len, plan, workspace, out, scale)
    suffix = (q, k_pages, v_pages, table, length, plan, workspace, out, scale)
    at_once = plan.prefix_splits and (plan.meet or plan.suffix_splits > 1)
    if at_once and workspace.side_stream is not None:
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
    out: Tensor,
    scale: float,
) -> None:
    """First level: all rows on the prompt. Writes states, and `out` where it comes last."""
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
        workspace.arrivals,
        out,
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
        MEET=plan.meet,
        num_warps=plan.prefix_warps,
        num_stages=plan.prefix_stages,
        maxnreg=plan.prefix_registers or None,
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
    """Second level: each row on its pages. Writes `out`, or a state where the first is late."""
    rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    assert q.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
    assert page_size % plan.suffix_block_n == 0, "a block of keys must not cross pages"
    suffix_kernel[(rows * num_kv_heads, plan.suffix_splits)](
        q,
        k_pages,
        v_pages,
        table,
        table.stride(0),
        length,
        workspace.output,
        workspace.lse,
        workspace.arrivals,
        out,
        rows,
        scale * LOG2_E,
        K=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        PAGE=page_size,
        BLOCK_M=MIN_DOT_ROWS,
        BLOCK_N=plan.suffix_block_n,
        PREFIX_STATES=plan.prefix_splits,
        SPLITS=plan.suffix_splits,
        MIN_BLOCKS=MIN_SPLIT_BLOCKS,
        MEET=plan.meet,
        num_warps=plan.suffix_warps,
        num_stages=plan.suffix_stages,
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
    )
