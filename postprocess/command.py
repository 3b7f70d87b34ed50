"""What the scripts' command lines share: folders to read, exit codes, tables, whole files.

Exit codes: 0 done; 1 the data is wrong or something was refused; 2 nothing to work on, or a bad
command line. The invariant: no fault of a file or a disk ends in a traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from postprocess.reading import BadFile, shown
from suite.settings import PROJECT

LOG = logging.getLogger("postprocess")
EXIT_OK, EXIT_WRONG, EXIT_NOTHING = 0, 1, 2


class Refused(ValueError):
    """The data does not allow what was asked: exit code 1, with the reason."""


class Nothing(ValueError):
    """There is nothing to work on: exit code 2, with what was looked for."""


def write_text(path: Path, text: str) -> None:
    """Writes beside, then renames: the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def dump(value: Any, indent: int | None = 2) -> str:
    """Strict JSON, ASCII (lone surrogates survive)."""
    return json.dumps(value, indent=indent, allow_nan=False) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns padded to their width; numbers are formatted by the caller."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def parser(doc: str | None, places: str = "archive") -> argparse.ArgumentParser:
    """The common part of the command lines: folders to read, by default the project's."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=raw)
    made.add_argument(
        "places",
        nargs="*",
        type=Path,
        default=[PROJECT / places],
        metavar="FOLDER",
        help=f"an archive or single runs (default: {places}/)",
    )
    return made


def guarded(work: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a script's work; what the data or the disk does wrong ends in a line and a code.

    Exit codes: 0 done; 1 the data is wrong or something was refused; 2 nothing to work on, or a bad
    command line.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    LOG.setLevel(logging.INFO)
    try:
        return work(args)
    except Nothing as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOTHING
    except (Refused, BadFile) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        what = error.strerror or shown(error)
        print(f"error: {shown(error.filename or '')}: {what}", file=sys.stderr)
    return EXIT_WRONG
