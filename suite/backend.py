"""What the device offers: its kernels, step launcher, fixed sizes and names.

Chosen by the device's type and dtype alone. Importing this needs no GPU and no Triton.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import platform

import torch

from engine.model import Transformer
from engine.ops import Ops, TorchOps
from engine.sampler import SamplingParams
from engine.stepper import EagerStepper, Sampler, Stepper, TorchSampler
from suite.settings import Settings

logger = logging.getLogger(__name__)

PAGE_SIZE = {"cpu": 32, "cuda": 4}
READ_CHUNK_TOKENS = {"cpu": 2048, "cuda": 32768}
MAX_ROWS_AT_ONCE = 4096  # in one decode step's forward pass; more rows go in slices
STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 16}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")


def is_fast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our GPU kernels can run: an NVIDIA GPU, a 16-bit dtype, and Triton."""
    if device.type != "cuda" or dtype == torch.float32:
        return False
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning(
            "triton is not installed: decoding goes through PyTorch, several times slower"
        )
    return found


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest backend for the device."""
    if not is_fast(device, dtype):
        return TorchOps()
    from engine.triton_ops import TritonOps

    return TritonOps()


def make_sampler(settings: Settings, model: Transformer) -> Sampler:
    """The sampler of the backend."""
    params = SamplingParams(settings.temperature, settings.top_k, settings.top_p)
    if not is_fast(model.device, model.dtype):
        return TorchSampler(params)
    from engine.triton_ops import TritonSampler

    return TritonSampler(params, model.config.vocab_size, MAX_ROWS_AT_ONCE, model.device)


def make_stepper(device: torch.device, dtype: torch.dtype) -> type[Stepper]:
    """How decode steps are launched."""
    if not is_fast(device, dtype):
        return EagerStepper
    from engine.cuda_graph import GraphStepper

    return GraphStepper


def versions() -> dict[str, str]:
    """Versions of what computed the numbers."""
    found = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        found[package] = importlib.metadata.version(package)
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
