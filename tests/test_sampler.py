"""The sampler's rules, by exact cases and by distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.sampler import SamplingParams, philox4x32, sample, split_key, uniforms

KEY = 0x0123456789ABCDEF
RANDOM123_VECTORS = [  # counter, key, output: the known answers of the Random123 distribution
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def exact_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The written rules for one row in float64, with a sort, one token at a time."""
    x = logits.astype(np.float64) / params.temperature
    kept = np.ones(len(x), dtype=bool)
    if 0 < params.top_k < len(x):
        kept = x >= np.sort(x)[-params.top_k]
    weights = np.where(kept, np.exp(x - x.max()), 0.0)
    if params.top_p < 1.0:
        needed, mass = params.top_p * weights.sum(), 0.0
        for i in np.argsort(-x, kind="stable"):
            mass += weights[i]
            if mass >= needed:
                weights = np.where(x >= x[i], weights, 0.0)
                break
    return weights / weights.sum()


def draw_counts(logits: torch.Tensor, params: SamplingParams, num_draws: int) -> np.ndarray:
    """How often each token of one row of logits comes out over that many candidates."""
    tokens, bad = sample(logits.expand(num_draws, -1), params, KEY, torch.arange(num_draws), step=7)
    assert not bad.any()
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1])


def chi_square_p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P(a chi-square this large or larger), by Wilson and Hilferty's cube root."""
    expected = probabilities * counts.sum()
    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was drawn"
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123_VECTORS)
def test_philox_gives_the_published_numbers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_uniforms_use_every_bit_of_key_candidate_and_step():
    candidate = torch.tensor([5])
    base = uniforms(KEY, candidate, 3).item()
    assert base == (int(base * 2**32) + 0.5) * 2.0**-32, "u is a 32-bit word plus a half"
    changed = [uniforms(KEY ^ (1 << bit), candidate, 3).item() for bit in (0, 31, 32, 63)]
    changed += [uniforms(KEY, candidate ^ (1 << bit), 3).item() for bit in (0, 31, 32, 62)]
    changed += [uniforms(KEY, candidate, 3 ^ (1 << bit)).item() for bit in (0, 15, 31)]
    assert len({base, *changed}) == len(changed) + 1
    assert split_key(KEY) == (0x89ABCDEF, 0x01234567)
    many = uniforms(KEY, torch.arange(20_000), 0)
    assert many.min() > 0 and many.max() < 1
    assert abs(many.mean().item() - 0.5) < 0.01 and abs(many.var().item() - 1 / 12) < 0.002


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=20),
        SamplingParams(temperature=1.7, top_k=0),
        SamplingParams(temperature=1.0, top_k=0, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.6),
        SamplingParams(temperature=1.0, top_k=-1, top_p=0.3),
        SamplingParams(temperature=1.0, top_k=10**6, top_p=0.999),
    ],
)
def test_draws_follow_the_exact_distribution(params):
    logits = torch.randn(80, generator=torch.Generator().manual_seed(1)) * 1.5
    counts = draw_counts(logits, params, 20_000)
    assert chi_square_p_value(counts, exact_probabilities(logits.numpy(), params)) > 1e-3


def test_the_chi_square_would_see_a_wrong_temperature():
    logits = torch.randn(80, generator=torch.Generator().manual_seed(1)) * 1.5
    counts = draw_counts(logits, SamplingParams(temperature=1.05, top_k=0), 20_000)
    wrong = exact_probabilities(logits.numpy(), SamplingParams(temperature=1.0, top_k=0))
    assert chi_square_p_value(counts, wrong) < 1e-4


def test_first_tokens_of_two_token_vocabulary_are_independent_draws():
    counts = draw_counts(torch.tensor([0.0, math.log(3.0)]), SamplingParams(), 1000)
    assert chi_square_p_value(counts, np.array([0.25, 0.75])) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_takes_the_lowest_id_of_the_maximum(dtype):
    logits = torch.zeros(3, 100, dtype=dtype)
    logits[0, [9, 40]] = 2.0
    logits[1, 99] = 1.0
    tokens, bad = sample(logits, SamplingParams(temperature=0.0), KEY, torch.arange(3), 0)
    assert tokens.tolist() == [9, 99, 0] and not bad.any()


def test_temperature_near_zero_is_greedy_and_does_not_overflow():
    logits = torch.tensor([[5.0, 5.0001, -3.0]]).expand(50, -1)
    tokens, bad = sample(logits, SamplingParams(temperature=1e-30), KEY, torch.arange(50), 0)
    assert (tokens == 1).all() and not bad.any()


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_tiny_top_p_keeps_the_maximum_and_its_ties(top_p):
    logits = torch.tensor([1.0, 4.0, 2.0, 4.0, 3.9])
    for top_k in (0, 3):
        counts = draw_counts(logits, SamplingParams(top_k=top_k, top_p=top_p), 2000)
        assert counts[[0, 2, 4]].sum() == 0
        assert chi_square_p_value(counts, np.array([0, 0.5, 0, 0.5, 0])) > 1e-3


def test_top_k_one_keeps_the_maximum_and_its_ties():
    counts = draw_counts(torch.tensor([1.0, 4.0, 2.0, 4.0]), SamplingParams(top_k=1), 2000)
    assert chi_square_p_value(counts, np.array([0, 0.5, 0, 0.5])) > 1e-3


@pytest.mark.parametrize("top_k", [-1, 0, 10**6, 30])
def test_top_k_off_or_above_the_vocabulary_keeps_everything(top_k):
    logits = torch.linspace(-1, 1, 30).expand(500, -1)
    everything = sample(logits, SamplingParams(top_k=0), KEY, torch.arange(500), 1)[0]
    tokens = sample(logits, SamplingParams(top_k=top_k), KEY, torch.arange(500), 1)[0]
    assert tokens.tolist() == everything.tolist()
    assert tokens.unique().numel() == 30


def test_ties_at_the_top_k_threshold_all_stay():
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0, 2.0])
    params = SamplingParams(top_k=2)
    counts = draw_counts(logits, params, 4000)
    assert (counts > 0).tolist() == [True, False, True, True, False, True]
    assert chi_square_p_value(counts, exact_probabilities(logits.numpy(), params)) > 1e-3
    flat = draw_counts(torch.zeros(40), SamplingParams(top_k=5), 8000)
    assert chi_square_p_value(flat, np.full(40, 1 / 40)) > 1e-3


def test_ties_at_the_top_p_threshold_all_stay():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]))
    params = SamplingParams(top_k=0, top_p=0.5)  # 0.4 is too little, one 0.2 would be enough
    logits[3] = logits[2]
    counts = draw_counts(logits, params, 4000)
    assert (counts > 0).tolist() == [False, True, True, True, False]
    assert chi_square_p_value(counts, exact_probabilities(logits.numpy(), params)) > 1e-3


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((60,), -torch.inf)
    logits[[0, 17, 59]] = torch.tensor([0.0, 1.0, -1.0])
    for params in (SamplingParams(), SamplingParams(top_k=0), SamplingParams(top_k=0, top_p=0.99)):
        counts = draw_counts(logits, params, 2000)
        assert set(np.flatnonzero(counts)) <= {0, 17, 59}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=0),
        SamplingParams(top_k=0, top_p=0.9),
        SamplingParams(top_k=10, top_p=0.5),
    ],
)
def test_bad_rows_are_flagged_and_leave_the_others_as_they_were(params):
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(2))
    clean = sample(logits, params, KEY, torch.arange(6), 4)[0]
    broken = logits.clone()
    broken[1, 30] = torch.nan
    broken[3] = -torch.inf
    broken[4, 0] = torch.inf
    tokens, bad = sample(broken, params, KEY, torch.arange(6), 4)
    assert bad.tolist() == [False, True, False, True, True, False]
    assert tokens[~bad].tolist() == clean[~bad].tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=40, top_p=0.7),
        SamplingParams(top_k=0),
        SamplingParams(top_k=0, top_p=0.9),
    ],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(params, monkeypatch):
    logits = torch.randn(24, 1000, generator=torch.Generator().manual_seed(3)) * 2
    logits[5] = 0.0  # ties everywhere: the widest row sets the width of the others' work
    candidates = torch.arange(24) * 1_000_003 + (1 << 33)
    together = sample(logits, params, KEY, candidates, 11)[0]
    alone = [
        sample(logits[i : i + 1], params, KEY, candidates[i : i + 1], 11)[0].item()
        for i in range(24)
    ]
    assert together.tolist() == alone
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    assert sample(logits[order], params, KEY, candidates[order], 11)[0].equal(together[order])
    monkeypatch.setattr("engine.sampler.CHUNK_ELEMENTS", 5000)  # five rows at a time
    assert sample(logits, params, KEY, candidates, 11)[0].equal(together)


def test_inverse_cdf_runs_in_vocabulary_order():
    logits = torch.log(torch.tensor([0.2, 0.3, 0.5]))
    candidates = torch.arange(300)
    tokens = sample(logits.expand(300, -1), SamplingParams(), KEY, candidates, 2)[0]
    u = uniforms(KEY, candidates, 2)
    assert tokens.tolist() == ((u > 0.2).long() + (u > 0.5).long()).tolist()


@pytest.mark.parametrize(
    "bad_value",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -2},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"top_p": math.nan},
    ],
)
def test_values_outside_the_rules_are_refused(bad_value):
    with pytest.raises(ValueError, match=next(iter(bad_value))):
        SamplingParams(**bad_value)
