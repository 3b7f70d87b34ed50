"""What the scripts' command lines share: folders, exit codes, tables, CSV, whole files.

Exit codes: 0 done; 1 the data is wrong or something was refused; 2 nothing to work on, or a bad
command line. The invariant: no fault of a file or a disk ends in a traceback.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
        with naming(path):
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The fault of a write (a full disk) does not say in which file; it gets this one's name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def dump(value: Any, indent: int | None = 2) -> str:
    """Strict JSON, ASCII (lone surrogates survive)."""
    return json.dumps(value, indent=indent, allow_nan=False) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns padded to their width; numbers are formatted by the caller."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """With full precision; an empty cell (None, NaN) is unknown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if cell is None or cell != cell else cell for cell in r] for r in rows])
    return out.getvalue()


def bare_parser(doc: str | None) -> argparse.ArgumentParser:
    """Nothing but the script's own words, as they are set."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The common part of the command lines: folders to read, by default the project's archive."""
    made = bare_parser(doc)
    made.add_argument(
        "places",
        nargs="*",
        type=Path,
        default=[PROJECT / "archive"],
        metavar="FOLDER",
        help="an archive or single runs (default: archive/)",
    )
    return made


def add_out(made: argparse.ArgumentParser, name: str) -> None:
    """Where the script writes; by default the project's folder of that name."""
    where = PROJECT / name
    made.add_argument("--out", type=Path, default=where, help=f"folder (default: {name}/)")


def guarded(work: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a script's work; what the data or the disk does wrong ends in a line and a code.

    Exit codes: 0 done; 1 the data is wrong or something was refused; 2 nothing to work on, or a bad
    command line.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    LOG.setLevel(logging.INFO)
    try:
        code = work(args)
        print(end="", flush=True)  # a fault must show here, not when Python ends
        return code
    except Nothing as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOTHING
    except (Refused, BadFile) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        what = error.strerror or shown(error)
        # Files are written under their names (naming()): what has none is the printing.
        print(f"error: {shown(error.filename or 'stdout', 300)}: {what}", file=sys.stderr)
        if error.filename is None:
            _silence_stdout()
    return EXIT_WRONG


def _silence_stdout() -> None:
    """What a closed stdout still holds would be tried, and complained of, when Python ends."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
