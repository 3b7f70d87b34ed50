"""Sampling without a sort over the vocabulary, one keyed random stream per candidate.

A draw depends only on (logits of the row, stream key, candidate, step), never on the rows beside
it, so a text is the same in every batch and method. This is the plain torch version: exact, for
any device, memory bounded by chunks of rows; the GPU's fused version is `engine/kernels/sample.py`.
It does not know stop tokens or lengths. Thresholds are compared on the logits themselves, which
dividing by a positive temperature leaves in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MASK32 = 0xFFFFFFFF
CHUNK_ELEMENTS = 1 << 22  # of logits worked on at a time: 32 MiB a float64 temporary


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0 or -1 is off; top_p 1.0 is off, 0 keeps the maximum."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 or more, got {self.temperature}; 0 always takes the most "
                "likely token"
            )
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or more, got {self.top_k}; 0 and -1 turn it off")
        if not 0.0 <= self.top_p <= 1.0:
            raise ValueError(f"top_p must be in [0, 1], got {self.top_p}; 1 turns it off")

    def effective_top_k(self, vocab_size: int) -> int:
        """How many values top-k keeps at the least, 0 where it keeps the whole vocabulary."""
        return self.top_k if 0 < self.top_k < vocab_size else 0


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011) on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # NOTE: the product can pass 2**63 and wraps; its 64 bits are right all the same.
        wide0, wide1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((wide1 >> 32) & MASK32) ^ c1 ^ k0,
            wide1 & MASK32,
            ((wide0 >> 32) & MASK32) ^ c3 ^ k1,
            wide0 & MASK32,
        )
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & MASK32, (k1 + PHILOX_KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def split_key(stream_key: int) -> tuple[int, int]:
    """A 64-bit stream key as Philox's two words: low 32 bits, high 32 bits."""
    return stream_key & MASK32, (stream_key >> 32) & MASK32


def uniforms(stream_key: int, candidates: Tensor, step: int) -> Tensor:
    """One float64 in (0, 1) for each candidate at this step."""  # [rows]
    candidates = candidates.to(torch.int64)
    counter = (
        candidates & MASK32,
        torch.full_like(candidates, step & MASK32),
        (candidates >> 32) & MASK32,
        torch.zeros_like(candidates),
    )
    word = philox4x32(counter, split_key(stream_key))[0]
    return (word.to(torch.float64) + 0.5) * 2.0**-32


def sample(
    logits: Tensor,  # [rows, vocab], any float dtype
    params: SamplingParams,
    stream_key: int,
    candidates: Tensor,  # [rows] int64: which random stream each row draws from
    step: int,  # answer tokens generated before this one
) -> tuple[Tensor, Tensor]:
    """Token of each row [rows] int64, and [rows] bool: True where the row could not be sampled.

    A row with a NaN, with +inf, or with nothing but -inf is bad; its token is 0 and means nothing.
    """
    chunk = max(1, CHUNK_ELEMENTS // logits.shape[1])
    draws = uniforms(stream_key, candidates, step)
    parts = [
        _sample_chunk(rows, params, u)
        for rows, u in zip(logits.split(chunk), draws.split(chunk), strict=True)
    ]
    tokens, bad = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, bad


def _sample_chunk(logits: Tensor, params: SamplingParams, u: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.float()
    best = x.amax(dim=1)  # NaN wherever the row has one
    bad = ~best.isfinite()
    x = torch.where(bad[:, None], 0.0, x)
    if params.temperature == 0:
        return torch.where(bad, 0, x.argmax(dim=1)), bad  # argmax: the first of equal values
    x, ids = _top_k(x, params.effective_top_k(x.shape[1]))
    weights = torch.exp((x.double() - x.amax(dim=1, keepdim=True)) / params.temperature)
    if params.top_p < 1.0:
        weights = torch.where(x >= _top_p_threshold(x, weights, params.top_p), weights, 0.0)
    tokens = _draw(weights, u)
    if ids is not None:
        tokens = ids.gather(1, tokens[:, None])[:, 0]
    return torch.where(bad, 0, tokens), bad


def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """The values that top-k keeps and their ids in vocabulary order; the rest is -inf or left out.

    Values equal to the k-th largest all stay, so a row can keep more than k.
    """
    if k == 0:
        return x, None
    values, ids = x.topk(k, dim=1)
    threshold = values[:, -1:]
    width = int(((x >= threshold) & (x > -torch.inf)).sum(dim=1).max())
    if width > k:
        values, ids = x.topk(width, dim=1)
    ids, order = ids.sort(dim=1)
    values = values.gather(1, order)
    return torch.where(values >= threshold, values, -torch.inf), ids


def _top_p_threshold(x: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """[rows, 1]: the largest value t such that the weights of all x >= t reach top_p of the sum.

    Bisection over the integers that order like the floats: 32 sums instead of a sort.
    """
    image = _ordered_image(x)
    needed = _sum(weights) * top_p
    high = image.amax(dim=1, keepdim=True)  # where even the maximum is enough: the answer
    low = image.amin(dim=1, keepdim=True)  # always enough: it keeps the whole row
    enough = _weight_from(image, weights, high) >= needed
    low = torch.where(enough, high, low)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = _weight_from(image, weights, middle) >= needed
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return torch.where(image >= low, x, torch.inf).amin(dim=1, keepdim=True)


def _weight_from(image: Tensor, weights: Tensor, threshold: Tensor) -> Tensor:
    return _sum(torch.where(image >= threshold, weights, 0.0))


def _sum(weights: Tensor) -> Tensor:
    # NOTE: Tensor.sum adds in an order that depends on the batch and on the width; cumsum goes
    # left to right, and weights of 0 in between change nothing.
    return weights.cumsum(dim=1)[:, -1:]


def _ordered_image(x: Tensor) -> Tensor:
    """int64 that compare like the float32 values (-0.0 and 0.0 become equal)."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF in vocabulary order: the first index whose running sum passes u * total."""
    running = weights.cumsum(dim=1)
    target = (u * running[:, -1]).unsqueeze(1)
    return torch.searchsorted(running, target, right=True)[:, 0]
