"""From settings to a running engine: models, memory plan, caches, decoder and reward.

The order matters: weights first, then the workspace is measured by running the largest forward
passes, and what is left of the memory is the KV budget. Nothing here decides about candidates.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from engine import memory
from engine.config import ModelConfig
from engine.decoder import Decoder
from engine.kv_cache import PagedKV
from engine.model import Transformer
from engine.ops import Ops
from engine.plan import Plan
from engine.stepper import Sampler, padded
from engine.weights import load_model
from rewards.base import Reward
from suite.backend import (
    DTYPES,
    MAX_ROWS_AT_ONCE,
    STEPS_BETWEEN_LOOKS,
    device_name,
    make_ops,
    make_sampler,
    make_stepper,
    versions,
)
from suite.chat import Chat, generator_chat
from suite.models import resolve
from suite.reward_side import Judge, load_judge, make_reward, reading_side
from suite.run_plan import check_budget, describe, plan_memory
from suite.settings import Settings

if TYPE_CHECKING:
    from suite.processes import Processes


@dataclasses.dataclass(slots=True)
class Assembly:
    """What a Generator works with."""

    chat: Chat
    decoder: Decoder
    reward: Reward
    plan: Plan
    device: torch.device
    chunks: list[memory.Chunk]

    def reset_counters(self) -> None:
        """Counters are of one prompt."""
        self.decoder.forget_prompt()
        self.reward.reset_counter()
        for chunk in self.chunks:
            chunk.num_splits = 0

    def measured(self) -> dict[str, Any]:
        """What the prompt's object records of the machine."""
        return {
            "peak_memory_bytes": memory.peak_bytes(self.device),
            "capture_sec": self.decoder.stepper.capture_sec,
            "out_of_memory_splits": sum(chunk.num_splits for chunk in self.chunks),
            "plan": dataclasses.asdict(self.plan),
            "versions": versions(),
            "device": device_name(self.device),
        }


def assemble(settings: Settings, processes: Processes) -> Assembly:
    """Load, plan and allocate. Raises ValueError with the reason and the remedy."""
    try:
        return _assemble(settings, processes)
    except (RuntimeError, MemoryError) as error:
        if not memory.is_out_of_memory(error):
            raise
        given = settings.kv_cache_gb
        value = "" if given is None else f" (now {given:.10g})"
        raise ValueError(
            f"out of memory while loading: {memory.in_words(error)}; lower --kv_cache_gb{value} or "
            "--gpu_memory_utilization, or take smaller models"
        ) from error


def _assemble(settings: Settings, processes: Processes) -> Assembly:
    device = processes.device
    dtype = DTYPES[settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    places = settings.model_dir, settings.local_files_only
    source = resolve(settings.llm_name, *places, role="generator")
    folder = source.ready()
    check_budget(settings, ModelConfig.from_folder(folder), dtype, device)
    chat = generator_chat(folder, source.name, settings.prompt_template)
    model, _ = load_model(folder, dtype, device)
    judge = load_judge(settings, dtype, device)
    parts = put_together(settings, chat, model, judge)
    if processes.is_main:
        print(describe(parts.plan, model), flush=True)
    return parts


def put_together(settings: Settings, chat: Chat, model: Transformer, judge: Judge) -> Assembly:
    """Plan the memory that is left beside loaded models, and allocate the caches."""
    ops = make_ops(model.device, model.dtype)
    sampler = make_sampler(settings, model)
    plan = plan_memory(settings, model, reading_side(settings, chat, model, judge), ops, sampler)
    decoder = _decoder(settings, model, ops, sampler, plan, chat)
    reward, reader = make_reward(settings, chat, decoder, judge, plan, ops)
    readers = [decoder, reader] if reader else [decoder]
    chunks = [
        chunk for each in readers for chunk in (each.chunk, each.prompt_chunk, each.cache.copying)
    ]
    return Assembly(chat, decoder, reward, plan, model.device, chunks)


def _decoder(
    settings: Settings, model: Transformer, ops: Ops, sampler: Sampler, plan: Plan, chat: Chat
) -> Decoder:
    bound = min(settings.max_tokens, model.config.max_positions)
    cache = PagedKV(
        model.config,
        num_pages=plan.pages,
        page_size=plan.page_size,
        max_rows=padded(plan.max_rows),
        max_row_tokens=plan.max_answer_tokens,
        max_prompt=bound,
        dtype=model.dtype,
        device=model.device,
    )
    return Decoder(
        model,
        ops,
        cache,
        sampler,
        chat.stop_ids,
        max_rows=plan.max_rows,
        look_every=STEPS_BETWEEN_LOOKS[model.device.type],
        ignore_stop=settings.ignore_stop,
        max_rows_at_once=MAX_ROWS_AT_ONCE,
        stepper=make_stepper(model.device, model.dtype),
    )
