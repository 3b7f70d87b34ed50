"""When rounds come: the arithmetic, and a run that follows it."""

from __future__ import annotations

import pytest

from engine.schedule import Schedule


def stops(schedule: Schedule, alpha: float, up_to: int) -> list[int]:
    found, length = [], 0
    while (length := schedule.next_stop(length, alpha)) <= up_to:
        found.append(length)
    return found


def test_halving_stops_where_rounds_cost_the_same():
    assert stops(Schedule("halving", min_tokens=16), 0.5, 300) == [16, 32, 64, 128, 256]
    lengths = stops(Schedule("halving", min_tokens=30), 0.4, 700)
    assert lengths == [30, 50, 83, 138, 230, 383, 638]
    rows = [0.6**i for i in range(len(lengths))]
    steps = [b - a for a, b in zip(lengths, lengths[1:], strict=False)]
    cost = [n * s for n, s in zip(rows[1:], steps, strict=False)]
    assert max(cost) / min(cost) < 1.03  # equal but for rounding to whole tokens


def test_halving_without_a_floor_starts_at_16():
    assert Schedule("halving").next_stop(0, 0.0) == 16
    assert Schedule("halving").next_stop(9, 0.0) == 16  # memory was full before


def test_halving_always_moves_by_a_rounds_tokens():
    schedule = Schedule("halving", min_tokens=16, min_round_tokens=8)
    assert schedule.next_stop(16, 0.1) == 24  # 17.8 would be a round of two tokens
    assert schedule.next_stop(100, 0.0) == 108


def test_fixed_stops_at_multiples():
    assert stops(Schedule("fixed", every=20), 0.5, 90) == [20, 40, 60, 80]
    assert Schedule("fixed", every=20).next_stop(33, 0.9) == 40
    assert Schedule("fixed", every=20, min_tokens=50).next_stop(0, 0.5) == 60
    assert Schedule("fixed", every=20, min_tokens=60).next_stop(0, 0.5) == 60


def test_memory_has_no_stops_of_its_own():
    assert Schedule("memory").next_stop(40, 0.5) is None


def test_floor():
    schedule = Schedule("memory", min_tokens=32)
    assert [schedule.may_cut(n) for n in (1, 31, 32, 33)] == [False, False, True, True]


@pytest.mark.parametrize("text", ["halving:3", "fixed", "fixed:", "fixed:x", "rounds", ""])
def test_parse_refuses(text):
    with pytest.raises(ValueError, match="--schedule"):
        Schedule.parse(text, 0, 8)


def test_parse():
    assert Schedule.parse("fixed:24", 7, 3) == Schedule("fixed", 24, 7, 3)
    assert Schedule.parse("memory", 0, 8) == Schedule()


def test_a_run_stops_where_the_schedule_says(search):
    made = search(schedule="fixed:20", alpha=0.25, init_batch_size=24)
    lengths = [r["stop_length"] for r in made["rounds"] if r["cutoff"] is not None]
    assert lengths == [20, 40, 60, 80]
    for entry in made["rounds"][:1]:  # the pool of the first round: all 24
        ended_before = 24 - entry["rows"]
        assert entry["kept"] == round(0.75 * (entry["rows"] + ended_before))
    assert {r["alpha"] for r in made["rounds"] if r["cutoff"] is not None} == {0.25}


# Two pages of 32 tokens for each of 24 rows: full at 65 tokens, for no row goes to 96 alone.
FULL_AT_65 = dict(kv_pages=48, init_batch_size=24, ignore_stop=True)


def test_halving_doubles_where_alpha_follows_the_prompt(search):
    made = search(schedule="halving", alpha="auto", min_tokens=8, init_batch_size=24)
    lengths = [r["stop_length"] for r in made["rounds"] if r["cutoff"] is not None]
    assert lengths[:3] == [8, 16, 32]


def test_full_memory_forces_a_stop_between_scheduled_ones(search):
    made = search(schedule="fixed:80", alpha=0.5, **FULL_AT_65)
    cuts = [r for r in made["rounds"] if r["cutoff"] is not None]
    assert [(r["stop_length"], r["kept"]) for r in cuts] == [(65, 12), (80, 6)]


def test_below_the_floor_only_what_others_need_is_cut(search):
    free = search(schedule="memory", alpha=0.9, **FULL_AT_65)["rounds"][0]
    floor = search(schedule="memory", alpha=0.9, min_tokens=70, **FULL_AT_65)["rounds"][0]
    assert (free["stop_length"], free["kept"], free["alpha"]) == (65, 2, 0.9)
    # Three pages each from here: 16 of 24 rows can grow by 8 tokens, the best 16 of them.
    assert (floor["stop_length"], floor["kept"], floor["alpha"]) == (65, 16, 0.0)
    assert floor["cutoff"] == sorted(floor["scores"])[-16]


@pytest.mark.parametrize("schedule", ["fixed:10", "halving"])
@pytest.mark.parametrize("alpha", [0.6, "auto"])
def test_the_last_candidate_is_read_once_more_only(search, schedule, alpha):
    """Where one is left of all, scheduled stops have nothing to decide; `rounds` still adds up."""
    one = dict(init_batch_size=1, ignore_stop=True)
    (only,) = search(schedule=schedule, alpha=alpha, **one)["rounds"]
    assert (only["rows"], only["stop_length"], only["cutoff"], only["kept"]) == (1, 96, None, 1)
    best = search(batch_size=1, ignore_stop=True)
    assert only["tokens_scored"] == best["tokens_scored"]
    assert only["tokens_generated"] == 96


def test_rounds_end_with_the_last_cut(search):
    """8, 3 and 1 rows: the third stop and those after it are passed over."""
    made = search(schedule="fixed:10", alpha=0.6, init_batch_size=8, ignore_stop=True)
    assert [(r["stop_length"], r["rows"], r["kept"]) for r in made["rounds"]] == [
        (10, 8, 3),
        (20, 3, 1),
        (96, 1, 1),
    ]
    assert len(made["rejected"]) == 7 and len(made["trajectories"]) == 1
    for name in ("tokens_generated", "tokens_scored"):
        assert made[name] == sum(r[name] for r in made["rounds"])


def test_a_rate_too_small_to_cut_anybody_asks_for_no_round(search):
    """0.1 of 3 rows is less than half a row, 0.2 of 3 is more, and 0.2 of 2 less again."""
    few = search(schedule="fixed:30", alpha=0.1, init_batch_size=3, ignore_stop=True)
    assert [(r["stop_length"], r["kept"]) for r in few["rounds"]] == [(96, 3)]
    more = search(schedule="fixed:30", alpha=0.2, init_batch_size=4, ignore_stop=True)
    assert [(r["stop_length"], r["kept"]) for r in more["rounds"]] == [(30, 3), (60, 2), (96, 2)]


def test_the_last_row_is_still_compared_with_those_that_finished(search):
    """One that goes on and two that ended: the round at 40 tokens may cut any of them."""
    made = search(schedule="fixed:10", alpha=0.3, init_batch_size=8, seed=1)
    rounds = [(r["stop_length"], r["rows"], r["kept"]) for r in made["rounds"]]
    assert rounds == [(10, 7, 6), (20, 3, 4), (30, 2, 3), (40, 1, 2), (0, 0, 2)]


def test_forks_go_on_from_a_single_row(search):
    made = search(schedule="fixed:20", alpha=0.5, init_batch_size=2, refill=True, ignore_stop=True)
    assert [r["stop_length"] for r in made["rounds"]] == [20, 40, 60, 80, 96]
    assert [r["forks"] for r in made["rounds"][:-1]] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 16),  # 48 pages of 32 tokens, three for each answer of 96
        ({"init_batch_size": 40}, 40),  # in waves
        ({"init_batch_size": 40, "max_batch_size": 40}, 40),
        ({"max_batch_size": 10}, 10),
    ],
)
def test_alpha_0_is_best_of_n_of_what_fits_at_full_length(search, options, rows):
    made = search(alpha=0.0, kv_pages=48, ignore_stop=True, **options)
    assert len(made["trajectories"]) == rows
    assert not made["rejected"]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 24),  # two pages for a first stretch of 65 tokens
        ({"init_batch_size": 9}, 9),
        ({"init_batch_size": 30}, 24),
        ({"max_batch_size": 11}, 11),
    ],
)
def test_rows_at_the_start(search, options, rows, caplog):
    made = search(alpha=0.5, kv_pages=48, ignore_stop=True, schedule="fixed:10", **options)
    assert made["rounds"][0]["rows"] == rows
    assert ("only 24 rows fit" in caplog.text) == (options.get("init_batch_size") == 30)
