"""How good a reward model is on held-out pairs: accuracy with intervals, baselines, length bias.

Accuracy counts a tie as half. Intervals are Wilson's at 95 %; since pairs of one prompt are not
independent, the overall figure and the lead over the length baseline also get a bootstrap over
prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.reward_training.backbone import RewardModel, collate, score_rows
from benchmarks.reward_training.pairs import Facts, Pair, micro_batches, sequences
from benchmarks.reward_training.training import score_pairs

NUM_RANDOM_HEADS = 20
NUM_RESAMPLES = 2000


def wilson(hits: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    if count == 0:
        return 0.0, 1.0
    share = hits / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)


def outcomes(values: np.ndarray) -> np.ndarray:
    """[pairs, 2] values of chosen and rejected -> 1, 0.5 or 0 a pair."""
    return (values[:, 0] > values[:, 1]) + 0.5 * (values[:, 0] == values[:, 1])


def accuracy(hits: np.ndarray) -> dict[str, float]:
    low, high = wilson(float(hits.sum()), len(hits))
    return {"pairs": len(hits), "accuracy": float(hits.mean()), "low": low, "high": high}


def prompt_bootstrap(values: np.ndarray, groups: Sequence[str], seed: int = 0) -> list[float]:
    """95 % interval of the mean of `values` when whole prompts are drawn again."""
    _, inverse = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.bincount(inverse, weights=values)
    sizes = np.bincount(inverse)
    draws = np.random.default_rng(seed).integers(0, len(sums), (NUM_RESAMPLES, len(sums)))
    means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    return [float(x) for x in np.percentile(means, [2.5, 97.5])]


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties at their mean."""
    unique, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    tops = np.cumsum(counts)
    assert len(unique) == len(counts)
    return (tops - (counts + 1) / 2)[inverse]


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Spearman's; NaN when one side does not vary."""
    a, b = ranks(left), ranks(right)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / norm) if norm else math.nan


@torch.no_grad()
def mean_log_likelihoods(
    model: RewardModel, pairs: Sequence[Pair], facts: Facts, max_tokens: int
) -> np.ndarray:
    """[pairs, 2]: mean log-likelihood of the answer's tokens and its turn end under the base model.

    Meant for a model without an adapter and with tied embeddings (the embedded one).
    """
    device = model.classifier.score.weight.device
    rows = sequences(pairs, facts)
    starts = np.repeat([len(p.prompt) for p in pairs], 2)
    table = model.decoder.get_input_embeddings().weight
    out = np.empty(len(rows))
    for chosen in micro_batches([len(row) for row in rows], max_tokens):
        ids, last = collate([rows[i] for i in chosen], facts.pad_id, device)
        states = model.decoder(input_ids=ids, use_cache=False).last_hidden_state
        for place, index in enumerate(chosen):
            span = slice(int(starts[index]), len(rows[index]))
            logits = states[place, span.start - 1 : span.stop - 1].float() @ table.float().T
            targets = ids[place, span]
            picked = logits.log_softmax(dim=-1).gather(1, targets[:, None])
            out[index] = float(picked.mean())
    return out.reshape(-1, 2)


def untrained_heads(
    model: RewardModel, pairs: Sequence[Pair], facts: Facts, max_tokens: int
) -> np.ndarray:
    """Accuracies of random heads on the base model's hidden states."""
    states = score_rows(model, sequences(pairs, facts), facts.pad_id, max_tokens, states=True)
    heads = np.random.default_rng(0).standard_normal((NUM_RANDOM_HEADS, states.shape[-1]))
    values = (states @ heads.T).reshape(len(pairs), 2, -1)
    return np.asarray([outcomes(values[:, :, i]).mean() for i in range(NUM_RANDOM_HEADS)])


def baselines(
    base: RewardModel, pairs: Sequence[Pair], facts: Facts, max_tokens: int
) -> dict[str, Any]:
    lengths = np.asarray([[p.chosen_chars, p.rejected_chars] for p in pairs])
    heads = untrained_heads(base, pairs, facts, max_tokens)
    likelihoods = mean_log_likelihoods(base, pairs, facts, max_tokens)
    spread = {"low": float(heads.min()), "high": float(heads.max()), "heads": NUM_RANDOM_HEADS}
    return {
        "longer answer": accuracy(outcomes(lengths)),
        "mean log-likelihood": accuracy(outcomes(likelihoods)),
        "untrained head": {"pairs": len(pairs), "accuracy": float(heads.mean()), **spread},
    }


def report(scores: np.ndarray, pairs: Sequence[Pair]) -> dict[str, Any]:
    """`scores` [pairs, 2] of chosen and rejected."""
    hits = outcomes(scores)
    groups = [p.group for p in pairs]
    lengths = np.asarray([[p.chosen_chars, p.rejected_chars] for p in pairs])
    longer = outcomes(lengths)
    uneven = longer != 0.5
    prefers_longer = np.where(longer == 1, hits, 1 - hits)[uneven]
    return {
        "overall": {**accuracy(hits), "prompt_bootstrap": prompt_bootstrap(hits, groups)},
        "lead over length": {
            "mean": float((hits - longer).mean()),
            "prompt_bootstrap": prompt_bootstrap(hits - longer, groups),
        },
        "kind": _by(hits, pairs, lambda p: p.kind),
        "source": _by(hits, pairs, lambda p: p.source),
        "chosen is longer": accuracy(hits[longer == 1]),
        "chosen is shorter": accuracy(hits[longer == 0]),
        "share where the longer answer scores higher": float(prefers_longer.mean()),
        "score": {"mean": float(scores.mean()), "std": float(scores.std())},
    }


def _by(
    hits: np.ndarray, pairs: Sequence[Pair], key: Callable[[Pair], str]
) -> dict[str, dict[str, float]]:
    keys = np.asarray([key(p) for p in pairs])
    return {str(name): accuracy(hits[keys == name]) for name in np.unique(keys)}


def evaluate(
    model: RewardModel, pairs: Sequence[Pair], facts: Facts, max_tokens: int, bfloat16: bool = False
) -> dict[str, Any]:
    """Scores in float32 unless asked otherwise: what the figures in the model card mean."""
    return report(score_pairs(model, pairs, facts, max_tokens, bfloat16), pairs)


def table(title: str, rows: dict[str, dict[str, float]]) -> str:
    lines = [f"| {title} | pairs | accuracy | 95 % |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {r['pairs']} | {r['accuracy']:.3f} | {r['low']:.3f} to {r['high']:.3f} |"
        for name, r in rows.items()
    ]
    return "\n".join(lines)
