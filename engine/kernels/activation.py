"""silu(gate) * up on the fused gate and up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import early_start


@triton.jit
def _silu_mul_kernel(gate_up, out, inner, programs_per_row, PDL: tl.constexpr, BLOCK: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    column = (tl.program_id(0) % programs_per_row) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = gate_up + row * 2 * inner + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + column, (activated * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """[rows, 2 * inner] (gate, then up) -> [rows, inner]."""
    assert gate_up.is_contiguous(), "gate_up must be contiguous"
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(inner))
    programs = triton.cdiv(inner, block)
    _silu_mul_kernel[(rows * programs,)](
        gate_up, out, inner, programs, BLOCK=block, num_warps=4, **early_start(gate_up.device, rows)
    )
    return out
