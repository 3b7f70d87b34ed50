"""Who is cut: the rule of a rejection round, as plain arithmetic.

The pool is every row that is still running and every finished row still kept. The best
max(1, round((1 - alpha) * pool)) of it stay, ties go to the lower index, a score that is NaN loses
to every number. Python's `round` decides: halves go to the even neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def num_kept(pool: int, alpha: float) -> int:
    """How many of a pool stay (paper, section 4: the best 1 - alpha), one at the least."""
    # NOTE: 0.1 * 5 is 0.5000000000000001 in binary; ten digits are what the user wrote.
    return min(pool, max(1, round(round((1 - alpha) * pool, 10))))


def ranked(scores: Mapping[int, float]) -> list[int]:
    """Candidate indices from best to worst."""
    return sorted(scores, key=lambda i: (math.isnan(scores[i]), -_number(scores[i]), i))


def keep_best(scores: Mapping[int, float], alpha: float) -> list[int]:
    """The candidates that stay, best first."""
    return ranked(scores)[: num_kept(len(scores), alpha)]


def _number(score: float) -> float:
    return 0.0 if math.isnan(score) else score
