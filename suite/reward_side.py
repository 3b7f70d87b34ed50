"""The reward of a run: which model it reads with, what that model may read, and the reader over it.

A judge is a loaded reward model, the name of a Python function, or None where the generator rewards
itself. How scores come out of a reading is rewards/' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.decoder import Decoder
from engine.kv_cache import PagedKV
from engine.model import Transformer
from engine.ops import Ops
from engine.plan import REWARD_PAGE_SIZE, Plan
from engine.reader import Reader
from rewards.base import Reward
from rewards.function_reward import FunctionReward, load_function
from rewards.loading import RewardModel, load_reward_model
from rewards.model_reward import ModelReward, SelfReward
from suite.chat import Chat, same_vocabulary
from suite.models import resolve
from suite.settings import Settings

LONGEST_TEMPLATE = 512  # tokens that a reward model's template may put around the prompt

Judge = RewardModel | str | None


def load_judge(settings: Settings, dtype: torch.dtype, device: torch.device) -> Judge:
    """The reward model, a function's name, or None where the generator rewards itself."""
    if settings.self_reward:
        return None
    source = resolve(
        settings.reward_model_name, settings.model_dir, settings.local_files_only, role="reward"
    )
    if source.kind == "function":
        return source.name
    return load_reward_model(source, dtype, device)


def _shares_ids(chat: Chat, model: Transformer, judge: RewardModel) -> bool:
    """Whether the reward model can read the generator's ids as they are, each one of them."""
    if model.config.vocab_size > judge.backbone.config.vocab_size:
        return False
    if judge.chat.form.between.endswith(" "):
        return False  # in text, this space and the answer's first word are one token
    return same_vocabulary(chat.tokenizer, judge.chat.tokenizer)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the memory plan needs to know of a reward that reads with a model."""

    model: Transformer
    max_prompt: int  # tokens
    end_tokens: int  # read behind each answer, each time


def reading_side(
    settings: Settings, chat: Chat, model: Transformer, judge: Judge
) -> Reading | None:
    """None for a function."""
    bound = min(settings.max_tokens, model.config.max_positions)
    if isinstance(judge, str):
        return None
    if judge is None:
        return Reading(model, bound, 0)
    same = _shares_ids(chat, model, judge)
    longest = (bound if same else 2 * bound) + LONGEST_TEMPLATE
    longest = min(judge.backbone.config.max_positions, longest)
    return Reading(judge.backbone, longest, len(judge.chat.after_ids))


def make_reward(
    settings: Settings,
    chat: Chat,
    decoder: Decoder,
    judge: Judge,
    plan: Plan,
    ops: Ops,
) -> tuple[Reward, Reader | None]:
    """The reward over its reader (None for a function)."""
    if isinstance(judge, str):
        function = load_function(judge)
        return FunctionReward(judge, function, chat.decode, settings.reward_timeout), None
    if judge is None:
        reader = _reader(decoder.model, ops, plan)
        return SelfReward(reader, chat.prompt_ids), reader
    same = _shares_ids(chat, decoder.model, judge)
    reader = _reader(judge.backbone, ops, plan, 1 if same else 2, len(judge.chat.after_ids))
    decode = None if same else chat.decode
    return ModelReward(reader, judge.head, judge.chat, decode), reader


def _reader(
    model: Transformer, ops: Ops, plan: Plan, stretch: int = 1, end_tokens: int = 0
) -> Reader:
    """A reader with its part of the plan; another tokenizer may stretch texts to more tokens."""
    bound = plan.max_answer_tokens * stretch + end_tokens
    cache = PagedKV(
        model.config,
        num_pages=plan.reward_pages,
        page_size=REWARD_PAGE_SIZE,
        max_rows=plan.max_rows if plan.keep_reward_cache else 0,
        max_row_tokens=bound,
        max_prompt=plan.reward_max_prompt,
        dtype=model.dtype,
        device=model.device,
    )
    return Reader(
        model,
        ops,
        cache,
        keep=plan.keep_reward_cache,
        chunk_tokens=plan.read_chunk_tokens,
        end_tokens=end_tokens,
    )
