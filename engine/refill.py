"""Who is forked into freed memory, as plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

STRETCH_TOKENS = 64  # what all rows must be able to grow by, where no schedule says the next stop


def parents_of_forks(ranked: Sequence[int], num_forks: int) -> list[int]:
    """One parent for each fork: evenly from the best down, the remainder to the best.

    With 3 survivors a > b > c and 5 forks: a, b, c, a, b.
    """
    return [ranked[i % len(ranked)] for i in range(num_forks)]
