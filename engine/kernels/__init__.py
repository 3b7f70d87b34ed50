"""Triton kernels of the decode step on a GPU; `reference.py` has the plain torch twin of each.

Nothing here is imported on a CPU: only the GPU backend imports these modules (they need triton).
Every kernel can be captured in a CUDA graph: lengths come from device scalars, grids from the
number of rows alone, and no call reads the device.
"""
