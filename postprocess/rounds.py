"""The `rounds` and `partials` of an object, checked. The paper's files have none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from postprocess.reading import count_of, finite, shown

LENGTH = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Round:
    """One round of scoring: `rows` live candidates at `stop_length`, `kept` of the pool went on.

    `scores` is candidate -> partial score. The last round (`final`) scores finished texts.
    """

    rows: int
    stop_length: int
    scores: dict[int, float]
    kept: int
    kv_bytes: int
    reward_kv_bytes: int
    final: bool


def rounds_of(item: dict[str, Any]) -> list[Round]:
    """The rounds in order; ValueError names a fault. A score that is not finite is left out."""
    listed = item.get("rounds") or []
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError(f"rounds: want a list of objects, got {shown(listed)}")
    return [_round(entry, position) for position, entry in enumerate(listed)]


def partials_of(item: dict[str, Any]) -> dict[int, dict[int, float]]:
    """Scores of the first tokens, of Best-of-N with --log_partial: {length: {candidate: score}}.

    ValueError names a fault; a score that is not finite is left out.
    """
    listed = item.get("partials") or {}
    if not isinstance(listed, dict) or not all(LENGTH.fullmatch(k) for k in listed):
        raise ValueError(
            f"partials: want lists of [candidate, score] by length, got {shown(listed)}"
        )
    found = {}
    for length, pairs in listed.items():
        whole = isinstance(pairs, list) and all(
            isinstance(pair, list) and len(pair) == 2 and count_of(pair[0]) is not None
            for pair in pairs
        )
        if not whole:
            raise ValueError(f"partials: {length}: want a list of [candidate, score]")
        found[int(length)] = {c: s for c, score in pairs if (s := finite(score)) is not None}
    return found


def _round(entry: dict[str, Any], position: int) -> Round:
    candidates, scores = (entry.get(key) or [] for key in ("candidates", "scores"))
    whole = isinstance(candidates, list) and isinstance(scores, list)
    if (
        not whole
        or len(candidates) != len(scores)
        or not all(count_of(c) is not None for c in candidates)
    ):
        raise ValueError(f"rounds: round {position}: candidates and scores do not belong together")
    kept = entry.get("kept")
    found = {
        c: score
        for c, s in zip(candidates, scores, strict=True)
        if (score := finite(s)) is not None
    }
    return Round(
        rows=_count(entry, "rows", position),
        stop_length=_count(entry, "stop_length", position),
        scores=found,
        kept=len(kept) if isinstance(kept, list) else _count(entry, "kept", position),
        kv_bytes=_count(entry, "kv_bytes", position),
        reward_kv_bytes=_count(entry, "reward_kv_bytes", position),
        final=entry.get("cutoff") is None,
    )


def _count(entry: dict[str, Any], key: str, position: int) -> int:
    value = entry.get(key, 0)
    if value is None:
        return 0
    if count_of(value) is None:
        raise ValueError(f"rounds: round {position}: {key}: want a count, got {shown(value)}")
    return value
