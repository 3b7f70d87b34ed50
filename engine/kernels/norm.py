"""RMSNorm, alone and fused with the residual addition before it.

Sums in float32; rounds where the Hugging Face models round (the normed value goes to the data's
dtype before it meets the weight), so that bfloat16 results match theirs bit for bit in most places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import early_start


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    x_stride,
    hidden,
    eps,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * hidden + column
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + value
        rounded = total.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    normed = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * hidden + column, (normed * w).to(y.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        hidden,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        **early_start(x.device, rows),
        num_warps=min(8, max(1, block // 512)),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """y = weight * x / rms(x), for x [rows, hidden] with contiguous columns."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in place, then y = rms_norm(residual). Both [rows, hidden]."""
    assert residual.is_contiguous() and residual.shape == x.shape, "residual must match x"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, residual, weight, eps, out)
    return out
