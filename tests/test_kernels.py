"""Each Triton kernel against its plain torch twin: on a GPU, or under Triton's CPU interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.triton_on_cpu import DEVICE, ON_GPU  # isort: split

from engine.decode_state import padded_ids
from engine.kernels import activation, attention, norm, reference, rope_append, sample
from engine.sampler import SamplingParams
from engine.sampler import sample as sample_on_host

# The interpreter has no bfloat16 arithmetic of its own, so only a GPU runs it.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
KEY = 0xFEDCBA9876543210


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def scalar(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32, device=DEVICE)


def assert_close(ours: torch.Tensor, twin: torch.Tensor, what: str = "result") -> None:
    """Relative error of the whole tensor, after a check that every element was written."""
    assert ours.isfinite().all(), f"{what} was not written everywhere"
    error = (ours.double() - twin.double()).norm() / twin.double().norm()
    assert error < TOLERANCE[ours.dtype], f"{what} is off by {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 576), (3, 1000)])
def test_rms_norm(rows, hidden, dtype):
    x, weight = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    out = torch.full_like(x, torch.nan)
    norm.rms_norm(x, weight, 1e-5, out=out)
    assert_close(out, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_leaves_the_sum_in_the_residual(dtype):
    x, weight = randn(4, 96, dtype=dtype), randn(96, dtype=dtype, seed=1)
    residual, twin_residual = (randn(4, 96, dtype=dtype, seed=2) for _ in range(2))
    out = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(out, reference.add_rms_norm(x, twin_residual, weight, 1e-5))
    assert residual.equal(twin_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 40), (5, 1536)])
def test_silu_mul(rows, inner, dtype):
    gate_up = randn(rows, 2 * inner, dtype=dtype) * 3
    out = torch.full((rows, inner), torch.nan, dtype=dtype, device=DEVICE)
    activation.silu_mul(gate_up, out=out)
    assert_close(out, reference.silu_mul(gate_up))


def make_cache(
    rows: int, kv_heads: int, head_dim: int, page_size: int, length: int, prompt: int, dtype
) -> SimpleNamespace:
    """A cache whose unused slots hold NaN, so that a kernel that reads them is found out."""
    pages_per_row = -(-length // page_size) + 1
    num_pages = rows * pages_per_row + 1
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(3)) + 1
    table = torch.zeros(rows + 2, pages_per_row, dtype=torch.int32)  # two rows of padding
    table[:rows] = order.view(rows, pages_per_row).int()
    cache = SimpleNamespace(table=table.to(DEVICE), page_size=page_size)
    shape = (num_pages, kv_heads, page_size, head_dim)
    cache.k, cache.v = (torch.full(shape, torch.nan, device=DEVICE, dtype=dtype) for _ in "kv")
    for i, pages in enumerate((cache.k, cache.v)):
        for column in range(pages_per_row):
            used = max(0, min(page_size, length - column * page_size))
            values = randn(rows, kv_heads, used, head_dim, dtype=dtype, seed=10 * column + i)
            pages[cache.table[:rows, column].long(), :, :used] = values
        pages[0] = 0.0  # the padding page
    prefix_shape = (kv_heads, prompt + 7, head_dim)
    cache.k_prefix, cache.v_prefix = (
        torch.full(prefix_shape, torch.nan, device=DEVICE, dtype=dtype) for _ in "kv"
    )
    cache.k_prefix[:, :prompt] = randn(kv_heads, prompt, head_dim, dtype=dtype, seed=4)
    cache.v_prefix[:, :prompt] = randn(kv_heads, prompt, head_dim, dtype=dtype, seed=5)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "length"),
    [(4, 2, 16, 1), (9, 3, 64, 17), (8, 8, 96, 16), (4, 2, 4, 9)],
)
def test_rope_append(heads, kv_heads, head_dim, length, qk_norm, dtype):
    rows, prompt = 3, 5
    ours, twin = (
        make_cache(rows, kv_heads, head_dim, 8, length - 1, prompt, dtype) for _ in range(2)
    )
    qkv = randn(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=6)
    angles = torch.outer(torch.arange(40), 10000 ** -(torch.arange(head_dim // 2) * 2 / head_dim))
    common = [qkv, angles.cos().to(DEVICE), angles.sin().to(DEVICE), scalar(prompt), scalar(length)]
    weights = [randn(head_dim, dtype=dtype, seed=s) for s in (7, 8)] if qk_norm else [None, None]
    q = rope_append.rope_append(*common, ours.k, ours.v, ours.table, *weights, eps=1e-6)
    q_twin = reference.rope_append(*common, twin.k, twin.v, twin.table, *weights, eps=1e-6)
    assert_close(q, q_twin, "query")
    for name, a, b in (("keys", ours.k, twin.k), ("values", ours.v, twin.v)):
        assert a.isnan().equal(b.isnan()), f"{name} were written elsewhere"
        assert_close(a.nan_to_num(), b.nan_to_num(), name)
    assert ours.v.nan_to_num().equal(twin.v.nan_to_num()), "values must be copied as they are"


def make_attention(cache: SimpleNamespace, q: torch.Tensor, length: int, prompt: int, **changes):
    """(inputs, plan, workspace) of a call whose workspace is poisoned."""
    rows, heads, head_dim = q.shape
    plan = attention.plan_attention(rows, heads, cache.k.shape[1], q.dtype, cache.k_prefix.shape[1])
    plan = replace(plan, **changes)
    workspace = attention.make_workspace({rows: plan}, heads, head_dim, q.dtype, DEVICE)
    workspace.output.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    own = (cache.k, cache.v, cache.table, scalar(length))
    return (q, *own, cache.k_prefix, cache.v_prefix, scalar(prompt)), plan, workspace


def attend(cache: SimpleNamespace, q: torch.Tensor, length: int, prompt: int, **changes):
    """The kernel's and the twin's attention of these queries; a second call must agree."""
    inputs, plan, workspace = make_attention(cache, q, length, prompt, **changes)
    out = torch.full((len(q), q[0].numel()), torch.nan, dtype=q.dtype, device=DEVICE)
    attention.decode_attention(*inputs, plan, workspace, out=out)
    again = attention.decode_attention(*inputs, plan, workspace)
    assert_close(again, out, "a second call")
    return out, reference.decode_attention(*inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "launch",
    [
        {"suffix_splits": 6},
        {"suffix_splits": 1, "prefix_splits": 3},
        {"suffix_splits": 1, "prefix_splits": 1},
    ],
    ids=["split-both", "split-prompt", "whole"],
)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "page", "length", "prompt"),
    [
        (1, 4, 2, 16, 16, 1, 1),
        (3, 9, 3, 64, 16, 133, 70),
        (5, 8, 1, 32, 4, 140, 64),  # a group of 8, prompt of whole blocks
        (2, 3, 3, 96, 8, 64, 129),  # no groups, a head_dim that is no power of two
        (2, 4, 1, 128, 128, 150, 20),  # a page of two blocks
        (20, 4, 2, 16, 1, 80, 40),  # a page for each token
        (3, 4, 2, 8, 4, 70, 66),  # heads smaller than the matrix unit's 16, as tests' models have
        (2, 4, 2, 4, 4, 9, 5),
    ],
)
def test_decode_attention(rows, heads, kv_heads, head_dim, page, length, prompt, launch, dtype):
    cache = make_cache(rows, kv_heads, head_dim, page, length, prompt, dtype)
    q = randn(rows, heads, head_dim, dtype=dtype, seed=9) * 2
    ours, twin = attend(cache, q, length, prompt, **launch)
    assert_close(ours, twin)


@pytest.mark.parametrize("suffix_splits", [1, 4])
def test_decode_attention_without_a_prompt(suffix_splits):
    cache = make_cache(2, 2, 32, 16, 87, 0, torch.float32)
    q = randn(2, 4, 32, seed=9)
    for prefix_splits in (0, 1, 2):  # no prefix kernel, or one that finds an empty prompt
        ours, twin = attend(
            cache, q, 87, 0, prefix_splits=prefix_splits, suffix_splits=suffix_splits
        )
        assert_close(ours, twin)


def test_decode_attention_survives_scores_far_apart():
    cache = make_cache(2, 1, 16, 16, 20, 20, torch.float32)
    cache.k_prefix[:, 3] *= 300.0
    ours, twin = attend(cache, randn(2, 2, 16, seed=9) * 20, 20, 20, suffix_splits=2)
    assert_close(ours, twin)


def test_padding_rows_do_not_disturb_the_others():
    cache = make_cache(2, 2, 16, 16, 20, 30, torch.float32)
    q = randn(4, 4, 16, seed=9)  # rows 2 and 3 have page 0 alone in the table
    ours, _ = attend(cache, q, 20, 30, suffix_splits=1)
    alone, twin = attend(cache, q[:2].contiguous(), 20, 30)
    assert_close(ours[:2], twin)
    assert_close(alone, twin)
    assert ours[2:].isfinite().all()


def run_sampler(
    logits: torch.Tensor,
    params: SamplingParams,
    step: int = 3,
    stop_ids: tuple[int, ...] = (),
    done: torch.Tensor | None = None,
) -> SimpleNamespace:
    rows, vocab = logits.shape
    sampler = sample.DeviceSampler(params, vocab, rows + 1, DEVICE)
    words = [
        word - (1 << 32) if word >= 1 << 31 else word for word in (KEY & 0xFFFFFFFF, KEY >> 32)
    ]
    result = SimpleNamespace(
        candidates=torch.arange(rows) * 7 + (1 << 34),
        tokens=torch.full((rows, step + 2), -1, dtype=torch.int32, device=DEVICE),
        last=torch.full((rows,), -1, dtype=torch.int64, device=DEVICE),
        done=torch.zeros(rows, dtype=torch.int32, device=DEVICE) if done is None else done,
        bad=torch.zeros(rows, dtype=torch.bool, device=DEVICE),
    )
    sampler(
        logits,
        torch.tensor(words, dtype=torch.int32, device=DEVICE),
        result.candidates.to(DEVICE),
        scalar(step),
        result.tokens,
        result.last,
        result.done,
        result.bad,
        padded_ids(stop_ids).to(DEVICE),
    )
    result.twin, result.twin_bad = sample_on_host(
        logits.cpu(), params, KEY, result.candidates, step
    )
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6, top_k=8, top_p=0.9),
        SamplingParams(top_k=20, top_p=0.0),
        SamplingParams(top_k=300),  # beyond the fast path
        SamplingParams(top_k=300, top_p=0.7),
        SamplingParams(top_k=0),
        SamplingParams(top_k=0, top_p=0.5),
        SamplingParams(top_k=0, top_p=1e-9),
        SamplingParams(top_k=1, temperature=1e-36),
    ],
    ids=str,
)
def test_sampler_draws_its_twins_tokens(params, dtype):
    rows, vocab = 12, 5003  # a vocabulary that fills neither groups nor blocks
    logits = (randn(rows, vocab, seed=1) * 3).to(dtype)
    logits[3] -= 50.0  # all negative
    logits[4] = torch.where(logits[4] > 0, -torch.inf, logits[4])
    result = run_sampler(logits, params, stop_ids=(int(logits[0].argmax()),))
    assert result.last.cpu().equal(result.twin)
    assert result.tokens[:, 3].cpu().long().equal(result.twin)
    assert (result.tokens[:, [0, 1, 2, 4]] == -1).all(), "wrote beside its column"
    stops = result.twin == int(logits[0].argmax())
    assert result.done.cpu().equal(stops * torch.tensor(4, dtype=torch.int32))  # step 3 is the 4th
    assert not result.bad.any()


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=0, top_p=0.9)],
    ids=str,
)
def test_sampler_flags_bad_rows_and_samples_the_others(params):
    logits = randn(7, 700, seed=1)
    logits[1, 600] = torch.nan
    logits[2] = -torch.inf
    logits[4, 0] = torch.inf
    logits[5] = torch.nan
    done = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    done[5] = 2  # a row that has ended may hold anything
    result = run_sampler(logits, params, done=done)
    assert result.bad.tolist() == [False, True, True, False, True, True, False]
    assert result.done.tolist() == [0, -4, -4, 0, -4, 2, 0]
    assert result.last.cpu().equal(result.twin)


def test_sampler_keeps_ties_that_overflow_its_buffer():
    logits = torch.zeros(4, 6000, device=DEVICE)
    logits[1] = randn(6000, seed=1).round()  # hundreds of equal values at the threshold
    logits[2] = randn(6000, seed=2)
    logits[3, 5999] = 1.0
    for params in (SamplingParams(), SamplingParams(top_k=10, top_p=0.9)):
        result = run_sampler(logits, params)
        assert result.last.cpu().equal(result.twin)


def test_sampler_takes_a_whole_row_where_the_nucleus_is_wide():
    logits = torch.cat((randn(3, 6000, seed=1) * 0.1, randn(3, 6000, seed=2) * 4.0))
    for params in (SamplingParams(top_k=0, top_p=0.9), SamplingParams(top_k=0, top_p=0.3)):
        result = run_sampler(logits, params)
        assert result.last.cpu().equal(result.twin)


def test_sampler_takes_many_stop_ids():
    logits = torch.zeros(20, 20, device=DEVICE)
    logits[torch.arange(20), torch.arange(20)] = 100.0
    for last in (17, 18):  # 16 ids, and one more than fills the smallest tensor of them
        result = run_sampler(logits, SamplingParams(), stop_ids=tuple(range(2, last + 1)))
        assert result.done.tolist() == [4 * (2 <= token <= last) for token in range(20)]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=0, top_p=0.9)], ids=str)
@pytest.mark.parametrize("vocab", [49_152, 128_256, 151_936])
def test_sampler_at_real_vocabularies(vocab, params):
    logits = (randn(64, vocab, seed=1) * 3).bfloat16()
    result = run_sampler(logits, params)
    assert result.last.cpu().equal(result.twin)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "length", "prompt"),
    [
        (120, 32, 8, 128, 200, 300),
        (480, 32, 8, 128, 300, 2048),
        (1, 32, 8, 128, 4000, 2000),
        (300, 9, 3, 64, 65, 64),
    ],
)
def test_decode_attention_at_real_shapes(rows, heads, kv_heads, head_dim, length, prompt, dtype):
    cache = make_cache(rows, kv_heads, head_dim, 64, length, prompt, dtype)
    ours, twin = attend(cache, randn(rows, heads, head_dim, dtype=dtype, seed=9), length, prompt)
    assert_close(ours, twin)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("suffix_splits", [1, 8])
def test_kernels_follow_the_device_scalars_inside_a_graph(suffix_splits):
    """One captured graph serves every length and prompt: the point of lengths on the device."""
    cache = make_cache(6, 2, 64, 64, 200, 150, torch.bfloat16)
    q = randn(6, 8, 64, dtype=torch.bfloat16, seed=9)
    length, prompt = scalar(1), scalar(1)
    plan = attention.plan_attention(6, 8, 2, q.dtype, 157)
    plan = replace(plan, suffix_splits=suffix_splits)
    workspace = attention.make_workspace({6: plan}, 8, 64, q.dtype, DEVICE)
    out = torch.empty(6, 8 * 64, dtype=q.dtype, device=DEVICE)
    arguments = (q, cache.k, cache.v, cache.table, length, cache.k_prefix, cache.v_prefix, prompt)
    attention.decode_attention(*arguments, plan, workspace, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.decode_attention(*arguments, plan, workspace, out=out)
    for own, shared in ((1, 150), (64, 1), (65, 149), (200, 64), (130, 0)):
        length.fill_(own)
        prompt.fill_(shared)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, reference.decode_attention(*arguments))
