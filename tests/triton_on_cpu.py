"""Import this before any kernel: without a GPU it turns Triton's CPU interpreter on.

Skips the importing test module where triton is not installed.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def _mend_interpreter() -> None:
    """Triton 3.6 writes int(array of one element), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are decorated
pytest.importorskip("triton", reason="the kernels need triton; it comes with torch's CUDA builds")
if not ON_GPU:
    _mend_interpreter()
