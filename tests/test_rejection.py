"""Who is cut in a round: the rule's table, its invariants, its ties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.rejection import keep_best, num_kept, ranked

NAN = math.nan
SCORES = st.dictionaries(
    st.integers(0, 200),
    st.one_of(st.floats(allow_infinity=False), st.sampled_from([0.0, -0.0, 1.0, NAN])),
    min_size=1,
    max_size=60,
)
ALPHAS = st.floats(0, 1, exclude_max=True)

# CASES 17, worked out by hand: (1 - alpha) * n, halves to the even neighbour, one at the least.
KEPT = {
    0.1: {1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 6: 5, 7: 6},
    0.5: {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3, 7: 4},
    0.9: {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1},
}


@pytest.mark.parametrize("alpha", KEPT)
def test_rounding_never_drops_the_last_row_and_never_all(alpha: float) -> None:
    """CASES 17: n from 1 to 7 at alpha .1, .5 and .9."""
    assert {n: num_kept(n, alpha) for n in range(1, 8)} == KEPT[alpha]


def test_rounding_is_that_of_the_decimals_that_the_user_wrote() -> None:
    assert num_kept(5, 0.9) == 1 and num_kept(15, 0.9) == 2, "1.5 is 1.4999999999999996 in binary"
    assert num_kept(960, 0.1) == 864 and num_kept(120, 0.5) == 60
    assert num_kept(1000, 0.0) == 1000


@given(SCORES, ALPHAS)
def test_invariants_of_a_round(scores: dict[int, float], alpha: float) -> None:
    kept = keep_best(scores, alpha)
    assert len(kept) == num_kept(len(scores), alpha)
    assert 1 <= len(kept) <= len(scores)
    assert len(set(kept)) == len(kept) and set(kept) <= set(scores)
    order = ranked(scores)
    assert sorted(order) == sorted(scores), "every candidate has one place"
    assert kept == order[: len(kept)]
    for better, worse in zip(order, order[1:], strict=False):
        a, b = scores[better], scores[worse]
        if math.isnan(a):
            assert math.isnan(b), "a NaN never beats a number"
        if a == b or (math.isnan(a) and math.isnan(b)):
            assert better < worse, "ties go to the lower index"
        else:
            assert math.isnan(b) or a > b


@given(SCORES, ALPHAS, st.randoms())
def test_the_order_of_the_rows_decides_nothing(scores, alpha, random) -> None:
    items = list(scores.items())
    random.shuffle(items)
    assert keep_best(dict(items), alpha) == keep_best(scores, alpha)


@given(st.integers(1, 3000), ALPHAS, ALPHAS)
def test_a_higher_rejection_rate_never_keeps_more(pool: int, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert num_kept(pool, high) <= num_kept(pool, low)


def test_nan_loses_to_every_number_and_equal_scores_to_the_lower_index() -> None:
    """CASES 6: NaN can't win."""
    scores = {4: NAN, 1: -1e308, 9: 2.0, 2: 2.0, 0: NAN}
    assert ranked(scores) == [2, 9, 1, 0, 4]
    assert keep_best({7: NAN, 3: NAN}, 0.5) == [3]
