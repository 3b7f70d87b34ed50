"""`--record_memory`: the GPU's allocations of the whole run, for https://pytorch.org/memory_viz.

Writes one snapshot a process into the output folder when the run ends, however it ends. The file is
made by torch in its own format and is never read by the suite.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from suite.processes import Processes

log = logging.getLogger(__name__)
MOST_ENTRIES = 1_000_000


@contextmanager
def recorded(wanted: bool, folder: Path, processes: Processes) -> Iterator[None]:
    """Records while the block runs; says so once where there is no GPU to record."""
    if wanted and processes.device.type != "cuda":
        log.warning("--record_memory records a GPU's memory; there is none here")
    if not wanted or processes.device.type != "cuda":
        yield
        return
    import torch

    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)
    try:
        yield
    finally:
        _store(folder / f"memory_process_{processes.rank}.pickle")


def _store(path: Path) -> None:
    """The snapshot, whole or not at all. Without room for it the run ends as it would have."""
    import torch

    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.cuda.memory._dump_snapshot(str(beside))
        os.replace(beside, path)
    except (OSError, MemoryError, RuntimeError) as e:  # the last: of a GPU that failed
        log.warning("%s could not be written (%s); the answers are safe", path, _in_words(e))
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _in_words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
