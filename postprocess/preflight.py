"""What is wrong with a pair of files before alpaca_eval sees them.

alpaca_eval 0.6.6 joins answers on the exact instruction and says little: a second copy multiplies
rows, a missing one shrinks n, numbers are no text. Nothing here asks a judge or writes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from postprocess.command import Refused
from postprocess.reading import load_json, shown

Rows = list[dict[str, Any]]
MAX_LENGTH_CONTROLLED = 805  # rows of alpaca_eval's table of instruction difficulties


def load_rows(path: Path) -> Rows:
    rows = load_json(path)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise Refused(f"{shown(path.name)}: want a JSON list of answers (not JSONL)")
    for position, row in enumerate(rows):
        for key in ("instruction", "output", "generator"):
            if not isinstance(row.get(key), str):
                raise Refused(f"{shown(path.name)}: row {position}: {key} is missing or no string")
    return rows


def by_generator(rows: Rows) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row["generator"], []).append(row)
    return groups


def faults(compare: Rows, reference: Rows) -> list[str]:
    """What alpaca_eval would misread or multiply silently."""
    found = []
    names = sorted({row["generator"] for row in reference})
    if len(names) > 1:
        found.append(
            f"the reference holds {len(names)} generators ({shown(', '.join(names))}), want one"
        )
    groups = by_generator(compare)
    if names[0] in groups:
        found.append(f"the reference {shown(names[0])} is among the compared as well")
    wanted = {row["instruction"] for row in reference}
    for name, rows in {"the reference": reference, **groups}.items():
        instructions = {row["instruction"] for row in rows}
        if len(instructions) < len(rows):
            found.append(f"{shown(name)}: {len(rows) - len(instructions)} instructions stand twice")
        if instructions != wanted:
            only = (len(instructions - wanted), len(wanted - instructions))
            text = f"{only[0]} instructions are not in the reference, {only[1]} are missing"
            found.append(f"{shown(name)}: {text}")
        if empty := [row["instruction"] for row in rows if not row["output"].strip()]:
            found.append(
                f"{shown(name)}: {len(empty)} empty outputs, the first for {shown(empty[0], 40)}"
            )
        if not re.fullmatch(r"[\w.+-]{1,150}", name.replace(" ", "_")) or name in (".", ".."):
            found.append(f"{shown(name)}: not fit for a folder's name")
    for key in ("output", "generator", "instruction"):
        for title, rows in (("compare", compare), ("reference", reference)):
            if all(_numeric(row[key]) for row in rows):
                text = f"{title}: every {key} is a number"
                found.append(f"{text}; alpaca_eval reads them as numbers, not text")
    return found


def length_faults(compare: Rows, reference: Rows) -> list[str]:
    """What the length-controlled rate can't do."""
    found = []
    outputs = {row["instruction"]: row["output"] for row in reference}
    if len(outputs) > MAX_LENGTH_CONTROLLED:
        found.append(f"{len(outputs)} instructions, it knows at most {MAX_LENGTH_CONTROLLED}")
    if len(outputs) < 2:
        found.append("one instruction, it needs two or more")
    for name, rows in by_generator(compare).items():
        gaps = {len(row["output"]) - len(outputs.get(row["instruction"], "")) for row in rows}
        if len(outputs) > 1 and len(gaps) == 1:
            text = f"every answer differs in length by {gaps.pop()} from the reference's"
            found.append(f"{shown(name)}: {text}")
    return found


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
