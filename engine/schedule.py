"""When a round of rejection comes: the next stopping length, as plain arithmetic.

memory    only when the KV cache is full, as in the paper.
halving   T, T/(1-alpha), T/(1-alpha)^2, ...: as a round leaves 1 - alpha of the rows, all rounds
          but the first generate equally many tokens.
fixed:K   every K tokens.

Full memory always forces a stop too; T (`min_tokens`) is a floor under the first cut for all three.
The method passes over a scheduled stop at which nobody can be cut (methods/speculative.py).
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_HALVING_STOP = 16  # answer tokens; scores of shorter texts are noise


@dataclass(frozen=True, slots=True)
class Schedule:
    """`kind` is "memory", "halving" or "fixed"; `every` is the K of fixed."""

    kind: str = "memory"
    every: int = 0
    min_tokens: int = 0
    min_round_tokens: int = 8

    @classmethod
    def parse(cls, text: str, min_tokens: int, min_round_tokens: int) -> Schedule:
        """From `--schedule`, `--min_tokens` and `--min_round_tokens`."""
        kind, _, every = text.partition(":")
        if kind not in ("memory", "halving", "fixed") or (kind == "fixed") != every.isdigit():
            raise ValueError(f"--schedule must be memory, halving or fixed:K, got {text!r}")
        return cls(kind, int(every or 0), min_tokens, min_round_tokens)

    def next_stop(self, length: int, alpha: float) -> int | None:
        """The answer length of the next round for rows that have `length` tokens now.

        `alpha` is what the round just made has dropped. None: when memory is full.
        """
        if self.kind == "memory":
            return None
        if self.kind == "fixed":
            after = max(length + 1, self.min_tokens)
            return -(-after // self.every) * self.every
        first = self.min_tokens or FIRST_HALVING_STOP
        if length < first:
            return first
        return max(length + self.min_round_tokens, round(length / (1 - alpha)))

    def may_cut(self, length: int) -> bool:
        """False below the floor: there a full memory drops only what the others need to grow."""
        return length >= self.min_tokens
