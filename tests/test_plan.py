"""The memory plan: never over its budget, monotone, and clear about what does not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from engine import memory
from engine.config import ModelConfig, RopeConfig
from engine.plan import (
    REWARD_PAGE_SIZE,
    DoesNotFit,
    Plan,
    Round,
    Side,
    enough_gigabytes,
    first_stretch,
    make_plan,
    pages_for,
)
from engine.stepper import bucket, num_buckets
from engine.workspace import Workspace
from suite.run_plan import _recording, check_budget, planned_rounds, read_chunk_tokens
from suite.settings import Settings


def side(layers: int, kv_heads: int, head_dim: int, value_bytes: int, max_prompt: int = 64) -> Side:
    config = ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_layers=layers,
        num_heads=kv_heads * 2,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        rope=RopeConfig(),
        max_positions=4096,
    )
    return Side(config, value_bytes, max_prompt)


SIDES = st.builds(
    side,
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([8, 64, 96, 128]),
    st.sampled_from([2, 4]),
    st.integers(1, 4000),
)
REQUESTS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 16, 32, 64]),
        "max_answer_tokens": st.integers(1, 4000),
        "max_rows": st.one_of(st.none(), st.integers(1, 2000)),
        "alpha": st.one_of(st.none(), st.floats(0, 0.99)),
        "reward_cache": st.sampled_from(["auto", "on", "off"]),
    }
)
LLAMA_8B = side(32, 8, 128, 2)


def planned(budget: int, generator: Side, reward: Side | None, request: dict) -> Plan | None:
    try:
        return make_plan(budget, generator, reward, **request)
    except DoesNotFit:
        return None


@given(st.integers(0, 10**12), SIDES, st.one_of(st.none(), SIDES), REQUESTS)
def test_pages_never_exceed_the_budget(budget, generator, reward, request) -> None:
    plan = planned(budget, generator, reward, request)
    assume(plan is not None)
    own = plan.pages * plan.page_size * generator.token_bytes
    other = plan.reward_pages * REWARD_PAGE_SIZE * reward.token_bytes if reward else 0
    assert own + other <= budget
    assert plan.rows_for(plan.max_answer_tokens) >= 1, "one row at full length fits, by promise"
    assert plan.max_rows <= plan.pages
    if request["max_rows"]:
        assert plan.max_rows <= request["max_rows"]
    if not plan.keep_reward_cache:
        assert plan.reward_pages == 0
    # The caches that are allocated for it: the pages, a padding page each, and the prompts.
    padding = plan.page_size * generator.token_bytes
    assert plan.generator_kv_bytes == generator.prompt_bytes + own + padding
    if reward:
        padding = REWARD_PAGE_SIZE * reward.token_bytes
        assert plan.reward_kv_bytes == reward.prompt_bytes + other + padding


@given(
    st.integers(0, 10**11),
    st.integers(0, 10**9),
    SIDES,
    st.one_of(st.none(), SIDES),
    REQUESTS,
)
def test_more_memory_never_gives_less(budget, more, generator, reward, request) -> None:
    small = planned(budget, generator, reward, request)
    assume(small is not None)
    large = planned(budget + more, generator, reward, request)
    assert large is not None
    assert large.pages >= small.pages and large.reward_pages >= small.reward_pages
    assert large.max_rows >= small.max_rows
    lengths = (1, 65, small.max_answer_tokens)
    assert all(large.rows_for(n) >= small.rows_for(n) for n in lengths)


@given(st.integers(0, 10**11), SIDES, st.one_of(st.none(), SIDES), REQUESTS)
def test_what_does_not_fit_says_how_much_is_missing(budget, generator, reward, request) -> None:
    """CASES 15. With the bytes that the message names the plan works."""
    try:
        make_plan(budget, generator, reward, **request)
        assume(False)
    except DoesNotFit as error:
        message = str(error)
    assert "--kv_cache_gb" in message and "--gpu_memory_utilization" in message
    assert "--max_tokens" in message
    missing = float(re.search(r"([\d.]+) GB more", message)[1])
    enough = budget + int((missing + 0.001) * 1e9)
    assert make_plan(enough, generator, reward, **request).rows_for(1) >= 1


@given(st.integers(1, 5000), st.sampled_from([1, 16, 32, 64]))
def test_a_row_has_pages_for_all_but_its_last_token(length: int, page_size: int) -> None:
    pages = pages_for(length, page_size)
    assert pages * page_size >= length - 1
    assert pages == 1 or (pages - 1) * page_size < length - 1


def test_rows_for_a_length_worked_out_by_hand() -> None:
    # 131,072 bytes a token, pages of 64 tokens: 8,388,608 bytes; 10 GB are 1192 pages.
    plan = make_plan(
        10_000_000_000, LLAMA_8B, None, page_size=64, max_answer_tokens=2048, max_rows=1000
    )
    assert (plan.pages, plan.max_rows) == (1192, 1000)
    assert plan.rows_for(65) == 1000, "one page each, the 65th token needs none"
    assert plan.rows_for(66) == 596 and plan.rows_for(2048) == 37
    assert "read once" in plan.why


@pytest.mark.parametrize(("max_rows", "alpha"), [(None, 0.5), (None, None), (7, 0.5), (7, None)])
def test_best_of_n_and_alpha_0_keep_no_reward_cache(max_rows, alpha) -> None:
    request = dict(page_size=64, max_answer_tokens=2048, max_rows=max_rows)
    plan = make_plan(10**10, LLAMA_8B, LLAMA_8B, **request, alpha=alpha)
    assert plan.keep_reward_cache == (alpha is not None)
    plan = make_plan(10**10, LLAMA_8B, LLAMA_8B, **request, alpha=0.0)
    assert not plan.keep_reward_cache and "read once" in plan.why


@pytest.mark.parametrize("end_tokens", [0, 5, 127, 130, 1000])
@pytest.mark.parametrize("reward_cache", ["on", "auto"])
def test_turns_with_long_ends_leave_room_for_answers(end_tokens: int, reward_cache: str) -> None:
    request = dict(page_size=4, max_answer_tokens=128, alpha=0.5, chunk_tokens=32768)
    reward = replace(LLAMA_8B, end_tokens=end_tokens)
    plan = make_plan(10**9, LLAMA_8B, reward, reward_cache=reward_cache, **request)
    assert plan.rows_for(65) >= 5
    with pytest.raises(DoesNotFit, match=r"-1\.000 GB and 1\.0[1-9]\d GB more"):
        make_plan(-(10**9), LLAMA_8B, LLAMA_8B, **request)


def test_every_number_of_rows_has_a_recorded_step_near_it() -> None:
    """Eights up to 64; then an eighth apart at the most: 72, 80, ... 128, 144, ... 256."""
    assert [num_buckets(rows) for rows in (1, 8, 9, 64, 128, 256)] == [1, 1, 2, 8, 16, 24]
    assert all(rows <= bucket(rows) <= max(8, rows * 1.125) + 8 for rows in range(1, 5000))
    space = Workspace(decode_bytes=1, launch_sec=0.25)
    assert _recording(61, space) == {"recorded_steps": 8, "recording_sec": 4.0}


def test_the_first_stretch_fills_both_caches_together() -> None:
    request = dict(page_size=8, max_answer_tokens=2048, alpha=0.5, chunk_tokens=6400)
    plan = make_plan(10**10, LLAMA_8B, replace(LLAMA_8B, end_tokens=5), **request)
    stretch = first_stretch(8, 2048)
    assert stretch == 65
    rows = plan.rows_for(stretch)
    assert rows == plan.max_rows and 0 <= plan.pages - rows * pages_for(stretch, 8) < 8
    answers = rows * -(-stretch // REWARD_PAGE_SIZE)
    ends = 100 * 3  # pages of 5 tokens, for the 100 rows of 64 tokens in one pass
    assert abs(plan.reward_pages - answers - ends) <= 0.003 * plan.reward_pages
    assert first_stretch(64, 20) == 20 and first_stretch(32, 999) == 65


def test_the_reward_cache_can_be_forced_and_says_so() -> None:
    request = dict(page_size=64, max_answer_tokens=2048, alpha=0.5)
    on = make_plan(10**10, LLAMA_8B, LLAMA_8B, **request, reward_cache="on")
    off = make_plan(10**10, LLAMA_8B, LLAMA_8B, **request, reward_cache="off")
    assert on.keep_reward_cache and on.why == "--reward_cache on"
    assert not off.keep_reward_cache and off.why == "--reward_cache off"
    assert off.pages > on.pages
    auto = make_plan(10**10, LLAMA_8B, LLAMA_8B, **request)
    assert auto.keep_reward_cache and re.search(r"keeping .* [\d.]+ times faster", auto.why)


def test_a_small_reward_model_is_read_again_where_that_is_faster() -> None:
    """Keeping costs rows; a model of a thousandth of the size is not worth them."""
    tiny = side(1, 8, 128, 2)
    plan = make_plan(
        10**10, LLAMA_8B, tiny, page_size=64, max_answer_tokens=70, alpha=0.1, reward_cache="auto"
    )
    assert plan.reward_params < plan.generator_params / 10
    assert "times faster over" in plan.why


def test_out_of_memory_halves_the_chunk_and_counts() -> None:
    """CASES 14."""
    chunk, sizes = memory.Chunk("rows", 20), []

    def work() -> None:
        sizes.append(chunk.size)
        if chunk.size > 4:
            raise torch.OutOfMemoryError("scripted")

    chunk.retrying(work)
    assert sizes == [20, 10, 5, 2] and chunk.num_splits == 3
    chunk.retrying(work)
    assert sizes[4:] == [2], "the smaller size stays"


def test_out_of_memory_at_the_smallest_chunk_is_raised() -> None:
    chunk = memory.Chunk("rows", 3)

    def work() -> None:
        raise torch.OutOfMemoryError("scripted")

    with pytest.raises(torch.OutOfMemoryError):
        chunk.retrying(work)
    assert chunk.size == 3  # what comes after is not small for good


def test_memory_of_this_machine_is_in_order() -> None:
    cpu = torch.device("cpu")
    assert 0 < memory.free_bytes(cpu) <= memory.total_bytes(cpu)
    assert 10**7 < memory.peak_bytes(cpu) < memory.total_bytes(cpu)


def test_a_page_more_for_one_cache_is_no_page_less_for_the_other() -> None:
    """Monotone in single bytes too, across the border of a generator's page."""
    request = dict(page_size=64, max_answer_tokens=65, alpha=0.5, reward_cache="on")
    small = side(1, 1, 8, 4)
    start = 40 * 64 * small.token_bytes
    plans = [make_plan(start + more, small, small, **request) for more in range(0, 30000, 7)]
    assert plans[-1].pages > plans[0].pages + 1
    for one, two in zip(plans, plans[1:], strict=False):
        assert two.pages >= one.pages and two.reward_pages >= one.reward_pages


@pytest.mark.parametrize(
    "changes, rows, expected",
    [
        ({}, 960, 32768),  # large runs read in the usual parts
        ({"max_gen_tokens": 384}, 40, 40 * 384),
        ({"max_gen_tokens": 384, "kv_cache_gb": 0.2}, 960, 10_000),
        ({"max_gen_tokens": 16}, 8, 4096),  # never too few
    ],
)
def test_a_pass_reads_no_more_than_the_answers_can_have(changes, rows, expected):
    settings = Settings(**changes)
    assert read_chunk_tokens(settings, 20_000, 2048, rows, "cuda") == expected
    assert read_chunk_tokens(settings, 20_000, 2048, rows, "cpu") == 2048
    assert read_chunk_tokens(settings, 20_000, 30_000, rows, "cuda") >= 30_000, "a whole prompt"


def test_scheduled_rounds_worked_out_by_hand() -> None:
    base = dict(speculative_rejection=True, max_gen_tokens=100)
    halving = Settings(**base, schedule="halving", min_tokens=20, alpha=0.5)
    assert planned_rounds(halving, 100) == [
        Round(20, 1.0), Round(40, 0.5), Round(80, 0.25), Round(100, 0.125)
    ]  # fmt: skip
    refilled = Settings(**base, schedule="fixed:40", refill=True, refill_to=0.5)
    assert planned_rounds(refilled, 100) == [Round(40, 1.0), Round(80, 0.5), Round(100, 0.25)]
    assert planned_rounds(Settings(log_partial="16,64,900"), 80) == [
        Round(16, 1.0), Round(64, 1.0), Round(80, 1.0)
    ]  # fmt: skip
    assert planned_rounds(Settings(**base), 100) is None
    assert planned_rounds(Settings(), 100) is None


def test_the_schedule_decides_about_the_cache_by_predicted_time() -> None:
    """Ten rounds read a text five times over; the rows that the user asked for fit either way."""
    request = dict(page_size=64, max_answer_tokens=320, max_rows=40, alpha=0.5, step_rows=90.0)
    often = [Round(32 * i, 1.0) for i in range(1, 11)]
    plan = make_plan(10**10, LLAMA_8B, LLAMA_8B, **request, rounds=often)
    # Generated and read once: 320 tokens a row; read from the start each time: 32 * 55 = 1,760.
    steps = 90 * 320 / 40
    ratio = (1.2 * (320 + steps) + 1760) / (1.2 * (320 + steps) + 320)
    assert plan.keep_reward_cache
    assert plan.why == f"keeping is predicted {ratio:.2f} times faster over 10 rounds"
    once = make_plan(10**9, LLAMA_8B, LLAMA_8B, **request, rounds=[Round(320, 1.0)])
    assert not once.keep_reward_cache, "half of the rows, for nothing"


@given(st.integers(1, 10**14))
def test_the_gigabytes_that_a_message_asks_for_are_enough_and_little_more(num_bytes: int) -> None:
    asked = int(float(enough_gigabytes(num_bytes)) * 1e9)
    assert num_bytes <= asked <= num_bytes * 1.1 + 10**6


def test_a_budget_is_checked_by_the_config_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B shapes: 131,072 bytes a token, 2,047 tokens in pages of 4; weights of 16.1 GB."""
    monkeypatch.setattr("engine.memory.total_bytes", lambda device: 80 * 10**9)
    given = SHAPES["llama-3-8b"], torch.bfloat16, torch.device("cuda")
    for gigabytes in (None, 0.269, 63.9):
        check_budget(Settings(kv_cache_gb=gigabytes), *given)
    with pytest.raises(DoesNotFit, match="2047 answer tokens, 0.269 GB with this model, got 0.26;"):
        check_budget(Settings(kv_cache_gb=0.26), *given)
    with pytest.raises(DoesNotFit, match=r"16\.1 GB of the 80 .* \(cuda\) has in all, got 64;"):
        check_budget(Settings(kv_cache_gb=64), *given)
