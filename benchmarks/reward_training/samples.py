"""Scores of unfinished answers: samples of the base model, scored after 16, 32, 64, ... tokens.

For every prompt, Spearman's correlation over its candidates between the score of the first k
tokens (turn end appended) and the score of the whole answer; only candidates longer than k take
part. Also how often the candidate that wins in the end is in the better half at k, which is what
rejection risks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from benchmarks.reward_training.backbone import RewardModel, pretrained, score_rows
from benchmarks.reward_training.evaluation import NUM_RESAMPLES, rank_correlation
from benchmarks.reward_training.pairs import Facts

MIN_CANDIDATES = 8


@torch.no_grad()
def draw_samples(
    base: Path,
    facts: Facts,
    prompts: Sequence[np.ndarray],
    candidates: int,
    max_new_tokens: int,
    device: torch.device,
    seed: int = 0,
) -> list[list[np.ndarray]]:
    """Answers by prompt and candidate at temperature 1 and top-k 50, without the turn end."""
    name, keywords = pretrained(base)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="sdpa",
        **keywords,
    ).to(device)
    top = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), top), facts.pad_id, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[top - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
    mask = torch.tensor([[i >= top - len(p) for i in range(top)] for p in prompts])
    torch.manual_seed(seed)
    drawn = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device).long(),
        do_sample=True,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        num_return_sequences=candidates,
        max_new_tokens=max_new_tokens,
        eos_token_id=facts.turn_end_id,
        pad_token_id=facts.pad_id,
    )[:, top:].cpu()
    answers = [_until_end(row.numpy().astype(np.int32), facts.turn_end_id) for row in drawn]
    return [answers[i * candidates : (i + 1) * candidates] for i in range(len(prompts))]


def _until_end(row: np.ndarray, turn_end_id: int) -> np.ndarray:
    ends = np.flatnonzero(row == turn_end_id)
    return row[: ends[0]] if len(ends) else row


def save_samples(
    path: Path, prompts: Sequence[np.ndarray], answers: list[list[np.ndarray]]
) -> None:
    rows = [*prompts, *(answer for one in answers for answer in one)]
    lengths = np.asarray([len(row) for row in rows], dtype=np.int32)
    metadata = {"shape": json.dumps([len(prompts), len(answers[0])])}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": np.concatenate(rows), "lengths": lengths}, path, metadata)


def load_samples(path: Path) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    with safe_open(path, "numpy") as file:
        lengths, tokens = file.get_tensor("lengths"), file.get_tensor("tokens")
        num_prompts, candidates = json.loads(file.metadata()["shape"])
    rows = np.split(tokens, np.cumsum(lengths)[:-1])
    flat = rows[num_prompts:]
    return rows[:num_prompts], [
        flat[i * candidates : (i + 1) * candidates] for i in range(num_prompts)
    ]


def partial_scores(
    model: RewardModel,
    facts: Facts,
    prompts: Sequence[np.ndarray],
    answers: list[list[np.ndarray]],
    cuts: Sequence[int],
    max_tokens: int,
) -> dict[int, np.ndarray]:
    """[prompts, candidates] scores for every cut, and under 0 for whole answers."""
    end = np.asarray([facts.turn_end_id], dtype=np.int32)
    scores = {}
    for cut in (*cuts, 0):
        rows = [
            np.concatenate((prompt, answer[:cut] if cut else answer, end))
            for prompt, one in zip(prompts, answers, strict=True)
            for answer in one
        ]
        flat = score_rows(model, rows, facts.pad_id, max_tokens)
        scores[cut] = flat.reshape(len(prompts), -1)
    return scores


def partial_report(
    scores: dict[int, np.ndarray], answers: list[list[np.ndarray]]
) -> dict[str, Any]:
    whole = scores[0]
    lengths = np.asarray([[len(a) for a in one] for one in answers])
    by_cut = {}
    for cut, partial in scores.items():
        if cut == 0:
            continue
        correlations, kept = [], []
        for row in range(len(whole)):
            longer = lengths[row] > cut
            if longer.sum() < MIN_CANDIDATES:
                continue
            early, late = partial[row][longer], whole[row][longer]
            correlations.append(rank_correlation(early, late))
            kept.append(float((early > early[late.argmax()]).mean() < 0.5))
        by_cut[str(cut)] = {
            "prompts": len(correlations),
            **_mean_with_interval(correlations),
            "winner_in_better_half": float(np.mean(kept)) if kept else None,
        }
    length_bias = [rank_correlation(a, b) for a, b in zip(whole, lengths, strict=True)]
    return {
        "first k tokens with whole answer": by_cut,
        "length with score": _mean_with_interval(length_bias),
        "ended_by_themselves": float((lengths < lengths.max()).mean()),
        "mean_length": float(lengths.mean()),
    }


def _mean_with_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean over prompts with a bootstrap interval; prompts without variation are left out."""
    known = np.asarray([v for v in values if not math.isnan(v)])
    if not len(known):
        return {"mean": None, "low": None, "high": None}
    draws = np.random.default_rng(0).integers(0, len(known), (NUM_RESAMPLES, len(known)))
    low, high = np.percentile(known[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(known.mean()), "low": float(low), "high": float(high)}
