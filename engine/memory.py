"""Running out of memory, cured in the one place where work can be cut into chunks.

The KV pools are allocated ahead; what can still run out is the workspace of a forward pass, which
grows with the rows or tokens that it takes at once. A Chunk halves that number and tries again: the
result is the same, because no row depends on the rows beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Chunk:
    """How many rows or tokens go through one forward pass."""

    what: str
    size: int
    num_splits: int = 0  # how often memory ran out: recorded in the JSON
    smallest: int = 1

    def retrying(self, work: Callable[[], None], wanted: int | None = None) -> None:
        """Run `work`, which reads `size`; on running out of memory halve it and run again.

        `work` must be safe to run again from its start, and takes `wanted` at the most. At the
        smallest size the error is raised, and what comes after starts from the old size again.
        """
        before = self.size
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                old = min(self.size, wanted or self.size)
                if old <= self.smallest:
                    self.size = before
                    raise
                self.num_splits += 1
                self.size = max(self.smallest, old // 2)
            logger.warning("out of memory: %s at once from %d to %d", self.what, old, self.size)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's or Python's error, or the CPU allocator's, which is a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def in_words(error: BaseException) -> str:
    """The first line of an error, which for memory can be a page."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device (for the CPU: available memory)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reserved
    return _available_host_bytes()


def total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    import psutil

    return psutil.virtual_memory().total


def _available_host_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available


def peak_bytes(device: torch.device) -> int:
    """The most bytes in use so far: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
