"""Scores text answers with any reward model of the suite: the offline judge of win_rate.py.

The suite's rewards read candidates of token ids; here a candidate's only "token" is the number of
its text, and the reward's own `decode` looks it up. So the text goes through the same template,
engine and head as in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from postprocess.command import LOG, Refused
from postprocess.reading import shown

if TYPE_CHECKING:
    import torch

    from rewards.base import Reward

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


def score_answers(
    rows: Sequence[dict[str, Any]], model_name: str, model_dir: str | None
) -> dict[tuple[str, str], float]:
    """One score for each (instruction, output)."""
    import numpy as np

    from engine.candidates import Candidate, End
    from rewards.base import RewardFailed

    texts = list(dict.fromkeys(row["output"] for row in rows))
    number = {text: index for index, text in enumerate(texts)}
    by_instruction: dict[str, list[str]] = {}
    for row in rows:
        answers = by_instruction.setdefault(row["instruction"], [])
        if row["output"] not in answers:
            answers.append(row["output"])
    scores: dict[tuple[str, str], float] = {}
    try:
        reward = load_reward(
            model_name, model_dir, lambda answers: [texts[int(ids[0])] for ids in answers]
        )
        for done, (instruction, answers) in enumerate(by_instruction.items(), start=1):
            reward.begin(instruction)
            candidates = [
                Candidate(i, np.array([number[answer]], dtype=np.int32), End.LENGTH)
                for i, answer in enumerate(answers)
            ]
            for answer, score in zip(answers, reward.score(candidates), strict=True):
                if not math.isfinite(score):
                    raise Refused(f"no score for an answer to {shown(instruction)}")
                scores[instruction, answer] = score
            if done % 20 == 0:
                LOG.info("%d of %d instructions scored", done, len(by_instruction))
    except (RewardFailed, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{shown(model_name)}: {error}") from error
    return scores


def load_reward(model_name: str, model_dir: str | None, decode: Decode) -> Reward:
    """The reward model, reading text that `decode` looks up."""
    from engine.ops import TorchOps
    from engine.reader import Reader
    from rewards.function_reward import FunctionReward, load_function
    from rewards.loading import load_reward_model
    from rewards.model_reward import ModelReward
    from suite.models import resolve

    source = resolve(model_name, model_dir, False, role="reward")
    if source.kind == "function":
        return FunctionReward(source.name, load_function(source.name), decode, None)
    device, dtype = device_and_dtype()
    model = load_reward_model(source, dtype, device)
    cache = prompt_cache(model.backbone, model.backbone.config.max_positions)
    reader = Reader(model.backbone, TorchOps(), cache, keep=False, chunk_tokens=8192)
    return ModelReward(reader, model.head, model.chat, decode)


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """As main.py chooses them: a GPU in bfloat16, else the CPU in float32."""
    import torch

    cuda = torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32


def prompt_cache(model: Any, max_prompt: int) -> Any:
    """A cache for the shared prompt alone; answers are read once and not kept."""
    from engine.kv_cache import PagedKV

    return PagedKV(
        model.config,
        num_pages=0,
        page_size=1,
        max_rows=0,
        max_row_tokens=0,
        max_prompt=min(max_prompt, 8192),
        dtype=model.dtype,
        device=model.device,
    )
