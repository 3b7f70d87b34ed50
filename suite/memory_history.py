"""`--record_memory`: the GPU's allocations of the whole run, for https://pytorch.org/memory_viz.

Writes one snapshot a process into the output folder when the run ends, however it ends. The file is
made by torch in its own format and is never read by the suite.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
        path = folder / f"memory_process_{processes.rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
