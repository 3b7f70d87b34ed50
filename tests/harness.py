"""Small builders that the engine's tests share: caches, decoders and readers on tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import ModelConfig
from engine.decoder import Decoder
from engine.kv_cache import PagedKV
from engine.model import Transformer
from engine.ops import TorchOps
from engine.packing import pack
from engine.reader import Reader
from engine.sampler import SamplingParams
from engine.stepper import TorchSampler, padded
from engine.weights import load_model
from rewards.loading import load_reward_model
from rewards.model_reward import ModelReward
from suite.models import resolve

CPU = torch.device("cpu")
KEY = 0x0123456789ABCDEF


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(folder, dtype, CPU)[0]


def reference(folder: Path) -> torch.nn.Module:
    """The same weights through transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def new_cache(config: ModelConfig, **sizes: int) -> PagedKV:
    defaults = dict(num_pages=64, page_size=4, max_rows=16, max_row_tokens=64, max_prompt=128)
    return PagedKV(config, **{**defaults, **sizes}, dtype=torch.float32, device=CPU)


def new_decoder(
    model: Transformer,
    *,
    stop_ids: Sequence[int] = (2,),
    sampling: SamplingParams | None = None,
    max_rows: int = 64,
    look_every: int = 1,
    **sizes: int,
) -> Decoder:
    sizes = {"num_pages": 64 * max_rows, "max_row_tokens": 256, **sizes}
    cache = new_cache(model.config, max_rows=padded(max_rows), **sizes)
    sampling = sampling or SamplingParams(top_k=0)
    return Decoder(
        model,
        TorchOps(),
        cache,
        TorchSampler(sampling),
        stop_ids,
        max_rows=max_rows,
        look_every=look_every,
    )


def new_reader(
    model: Transformer,
    *,
    keep: bool = True,
    chunk_tokens: int = 512,
    end_tokens: int = 0,
    **sizes: int,
) -> Reader:
    sizes = {"num_pages": 256, "max_rows": 32, "max_row_tokens": 256, "max_prompt": 256, **sizes}
    cache = new_cache(model.config, **sizes)
    return Reader(
        model, TorchOps(), cache, keep=keep, chunk_tokens=chunk_tokens, end_tokens=end_tokens
    )


@torch.inference_mode()
def hidden_states(model: Transformer, ids: Sequence[int]) -> torch.Tensor:
    """Every hidden state of one sequence, computed from its start: `[tokens, hidden]`."""
    cache = new_cache(model.config, num_pages=0, max_rows=0, max_prompt=0)
    tokens = torch.as_tensor(np.asarray(ids, dtype=np.int64))
    return model.extend(TorchOps(), tokens, pack(cache, [len(tokens)]))


def logits_of(model: Transformer, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(hidden_states(model, ids))


def decode_all(decoder: Decoder, prompt: Sequence[int], candidates: Sequence[int], length: int):
    """Runs the candidates to their end; token ids by candidate."""
    decoder.forget_prompt()
    decoder.start(prompt, KEY, candidates)
    decoder.run(length)
    return {c.index: c.tokens.tolist() for c in decoder.take_finished()}


def random_ids(count: int, seed: int = 0, low: int = 3, high: int = 259) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, count).tolist()


def hash_reward(prompt: str, answers: list[str]) -> list[float]:
    """A number in [0, 1) that each text decides alone, with many ties."""
    import zlib

    return [zlib.crc32(answer.encode("utf-8", "replace")) % 50 / 50 for answer in answers]


def nan_reward(prompt: str, answers: list[str]) -> list[float]:
    """No score for half of the texts, and none at all for the prompt "nothing"."""
    scores = hash_reward(prompt, answers)
    return [float("nan") if prompt == "nothing" or s < 0.5 else s for s in scores]


def empty_reward(prompt: str, answers: list[str]) -> list[float]:
    return []


def build_reward(folder: Path, decode: Any = None, **options: Any) -> ModelReward:
    made = load_reward_model(resolve(str(folder), role="reward"), torch.float32, CPU)
    return ModelReward(new_reader(made.backbone, **options), made.head, made.chat, decode)
