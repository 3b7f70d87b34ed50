"""How a run cuts its memory: weights, workspace and prompts first, the rest is keys and values.

The arithmetic is engine/plan.py's; here the settings, the loaded models and the measured memory
become its arguments. Nothing is allocated here, but on a GPU the workspace is measured by running
the largest forward passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine import memory
from engine.config import ModelConfig
from engine.model import Transformer
from engine.ops import Ops
from engine.plan import (
    FIRST_STRETCH_TOKENS,
    DoesNotFit,
    Plan,
    Round,
    Side,
    enough_gigabytes,
    first_stretch,
    gpu_step_rows,
    make_plan,
    pages_for,
)
from engine.schedule import Schedule
from engine.stepper import Sampler, num_buckets, padded
from engine.workspace import Workspace, measure_workspace
from suite.backend import MAX_ROWS_AT_ONCE, PAGE_SIZE, READ_CHUNK_TOKENS, is_fast
from suite.reward_side import Reading
from suite.settings import Settings

CPU_KV_BYTES = 250_000_000  # on a CPU speed is the limit, not memory: a few hundred short rows
CPU_SHARE = 0.25  # of the free memory, where that is less
LEAST_READ_TOKENS = 4096  # of a pass, at the least, however few rows there are


def check_budget(
    settings: Settings, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuses a --kv_cache_gb that can't work, by the generator's config, before weights load.

    What the reward model takes, and what others leave free, shows only later: a value between the
    bounds here may still be refused by the plan, or when the caches are allocated.
    """
    given = settings.kv_cache_gb
    if given is None:
        return
    page, side = PAGE_SIZE[device.type], Side(config, dtype.itemsize, 0)
    answer = longest_answer_of(settings, config)
    least = pages_for(answer, page) * page * side.token_bytes
    if int(given * 1e9) < least:
        raise DoesNotFit(
            f"--kv_cache_gb must hold one row of {answer} answer tokens, {enough_gigabytes(least)} "
            f"GB with this model, got {given:.10g}; raise it to that{_for_the_reward(settings)}, "
            "or lower --max_tokens or --max_gen_tokens"
        )
    total, weights = memory.total_bytes(device), config.num_params * dtype.itemsize
    if int(given * 1e9) > total - weights:
        raise DoesNotFit(
            f"--kv_cache_gb must fit beside the generator's weights, {weights / 1e9:.3g} GB of "
            f"the {total / 1e9:.3g} that this device ({device.type}) has in all, got {given:.10g}; "
            "lower it, leave it out to use what is free, or take a smaller model"
        )


def _for_the_reward(settings: Settings) -> str:
    """Who keeps the reward model's cache shares the budget with it."""
    keeps = _planned_alpha(settings) is not None and settings.reward_cache != "off"
    return " (and more where the reward model's cache is kept)" if keeps else ""


def longest_answer_of(settings: Settings, config: ModelConfig) -> int:
    """Tokens of the longest answer, behind a prompt of one."""
    bound = min(settings.max_tokens, config.max_positions)
    return min(settings.max_gen_tokens, bound - 1)


@contextmanager
def _naming_the_budget(settings: Settings) -> Iterator[None]:
    """A budget that the user gave is named as it was given."""
    try:
        yield
    except DoesNotFit as error:
        if settings.kv_cache_gb is None:
            raise
        given = f"--kv_cache_gb {settings.kv_cache_gb:.10g}"
        raise DoesNotFit(f"{given} is too small: {error}") from error


def plan_memory(
    settings: Settings,
    model: Transformer,
    judge: Reading | None,
    ops: Ops,
    sampler: Sampler,
) -> Plan:
    """The cut of the memory that is left after weights, prompts' buffers and workspace."""
    device = model.device
    value_bytes = torch.finfo(model.dtype).bits // 8
    bound = min(settings.max_tokens, model.config.max_positions)
    generator = Side(model.config, value_bytes, bound)
    reward = None
    if judge:
        reward = Side(judge.model.config, value_bytes, judge.max_prompt, judge.end_tokens)
    weights = model.weight_bytes
    if judge and judge.model is not model:
        weights += judge.model.weight_bytes
    prompts = generator.prompt_bytes + (reward.prompt_bytes if reward else 0)
    rows = min(MAX_ROWS_AT_ONCE, _most_rows(settings, generator))
    longest = max(generator.max_prompt, reward.max_prompt if reward else 0)
    chunk = read_chunk_tokens(settings, generator.token_bytes, longest, rows, device.type)
    space = _workspace(model, judge.model if judge else None, ops, sampler, rows, chunk)
    longest_answer = longest_answer_of(settings, model.config)
    with _naming_the_budget(settings):
        plan = make_plan(
            _budget_bytes(settings, device, prompts, space),
            generator,
            reward,
            page_size=PAGE_SIZE[device.type],
            max_answer_tokens=longest_answer,
            max_rows=_max_rows(settings),
            alpha=_planned_alpha(settings),
            rounds=planned_rounds(settings, longest_answer),
            reward_cache=settings.reward_cache,
            step_rows=gpu_step_rows(model.config) if device.type == "cuda" else 0.0,
            chunk_tokens=chunk,
        )
    return dataclasses.replace(
        plan,
        weight_bytes=weights,
        workspace_bytes=max(space.decode_bytes, space.read_bytes),
        **(_recording(plan.max_rows, space) if is_fast(device, model.dtype) else {}),
        predicted_peak_bytes=weights
        + plan.generator_kv_bytes
        + plan.reward_kv_bytes
        + max(space.decode_bytes, space.read_bytes),
    )


def _workspace(
    model: Transformer,
    reader: Transformer | None,
    ops: Ops,
    sampler: Sampler,
    rows: int,
    chunk_tokens: int,
) -> Workspace:
    """What the largest forward passes take; measured on a GPU, of no account on a CPU."""
    if model.device.type != "cuda":
        return Workspace()
    sizes = {"rows": rows, "tokens": chunk_tokens, "page_size": PAGE_SIZE["cuda"]}
    return measure_workspace(model, reader or model, ops, sampler, **sizes)


def _recording(max_rows: int, space: Workspace) -> dict[str, Any]:
    """How many steps a GPU may record, and the seconds for all: a rehearsal and a recording each.

    The memory of recording is the step's workspace, which `_budget_bytes` counts twice.
    """
    steps = num_buckets(padded(max_rows))
    return {"recorded_steps": steps, "recording_sec": steps * 2 * space.launch_sec}


def read_chunk_tokens(
    settings: Settings, token_bytes: int, longest_prompt: int, rows: int, device_type: str
) -> int:
    """Tokens that one forward pass reads at the most: no more than `rows` answers can have.

    Fewer than READ_CHUNK_TOKENS make the workspace smaller, so that small runs are planned as
    closely as large ones. A prompt is read whole, hence the floor.
    """
    answers = rows * settings.max_gen_tokens
    if settings.kv_cache_gb is not None:
        answers = min(answers, int(settings.kv_cache_gb * 1e9 / token_bytes))
    return min(READ_CHUNK_TOKENS[device_type], max(LEAST_READ_TOKENS, longest_prompt, answers))


def _planned_alpha(settings: Settings) -> float | None:
    """The rejection rate to plan with; None where every answer is read once."""
    if not settings.speculative_rejection:
        return 0.5 if settings.log_partial else None
    return 0.5 if settings.alpha == "auto" else float(settings.alpha)


def planned_rounds(settings: Settings, longest_answer: int) -> list[Round] | None:
    """The scorings that do not wait for memory to be full; None where there are none.

    A fork shares what was read of its parent, so with the cache it too costs only what is new.
    """
    if settings.log_partial and not settings.speculative_rejection:
        lengths = [int(length) for length in settings.log_partial.split(",")]
        stops = sorted({min(length, longest_answer) for length in [*lengths, longest_answer]})
        return [Round(length, 1.0) for length in stops]
    if not settings.speculative_rejection or settings.schedule == "memory":
        return None
    alpha = _planned_alpha(settings)
    schedule = Schedule.parse(settings.schedule, settings.min_tokens, settings.min_round_tokens)
    left = settings.refill_to if settings.refill else 1 - alpha
    length, share, rounds = 0, 1.0, []
    while length < longest_answer:
        length = min(longest_answer, schedule.next_stop(length, alpha))
        rounds.append(Round(length, share))
        share *= left
    return rounds


def _most_rows(settings: Settings, generator: Side) -> int:
    """Rows that a step can have at the most, padding included: what the workspace is for."""
    rows = _max_rows(settings) or MAX_ROWS_AT_ONCE
    if settings.kv_cache_gb is not None:
        first = max(1, min(FIRST_STRETCH_TOKENS, settings.max_gen_tokens - 1))
        first_bytes = first * generator.token_bytes  # of a row at the start
        rows = min(rows, int(settings.kv_cache_gb * 1e9 / first_bytes))
    return padded(max(1, rows))


def _max_rows(settings: Settings) -> int | None:
    if not settings.speculative_rejection:
        return settings.batch_size
    return settings.init_batch_size or settings.max_batch_size


def _budget_bytes(
    settings: Settings, device: torch.device, prompt_bytes: int, space: Workspace
) -> int:
    """Bytes for answers' KV: what the user said, or what is left after all else."""
    if settings.kv_cache_gb is not None:
        return int(settings.kv_cache_gb * 1e9)
    free = memory.free_bytes(device)
    if device.type == "cpu":
        return min(CPU_KV_BYTES, int(free * CPU_SHARE))
    # Decoding takes its workspace twice: once in the pool of the graphs, once to rehearse them.
    free -= prompt_bytes + 2 * space.decode_bytes + space.read_bytes
    return int(free - (1 - settings.gpu_memory_utilization) * memory.total_bytes(device))


def describe(plan: Plan, model: Transformer) -> str:
    """The plan in words, printed before the first prompt."""
    stretch = first_stretch(plan.page_size, plan.max_answer_tokens)
    lines = [
        f"plan: weights {plan.weight_bytes / 1e9:.2f} GB, KV budget {plan.budget_bytes / 1e9:.2f} "
        f"GB = {plan.pages} pages of {plan.page_size} tokens",
        f"plan: {plan.rows_for(stretch)} rows fit at {stretch} answer tokens, "
        f"{plan.rows_for(plan.max_answer_tokens)} at {plan.max_answer_tokens}",
    ]
    if plan.recorded_steps:
        lines.append(
            f"plan: a step is recorded for each of {plan.recorded_steps} numbers of rows when it "
            f"is first needed, {plan.recording_sec:.1f} s for all of them"
        )
    if plan.reward_params:
        kept = "kept" if plan.keep_reward_cache else "not kept"
        lines.append(f"plan: the reward model's cache is {kept} between rounds ({plan.why})")
    return "\n".join(lines)
