"""Programmatic dependent launch: a kernel's start overlaps the end of the one before it.

On Hopper and later a kernel launched with it may start before its predecessor in the stream is
done; it must call `gdc_wait` before it touches anything that a predecessor wrote or reads. A step
of few rows is a few hundred kernels of two microseconds, and this takes 0.4 off each. Kernels of
many waves gain nothing: the early programs take room from those still running.
"""

from __future__ import annotations

import functools

import torch

MAX_ROWS = 256  # up to which it was seen to pay


@functools.cache
def _supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def early_start(device: torch.device, rows: int, wanted: bool = True) -> dict[str, bool]:
    """Launch options of a kernel with a PDL parameter."""
    if device.type == "cuda" and wanted and rows <= MAX_ROWS and _supported(device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
