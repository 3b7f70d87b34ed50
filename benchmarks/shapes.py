"""Model shapes for benchmarks with random weights: speed and memory, never quality."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import ModelConfig, RopeConfig
from engine.model import Transformer

SHAPES = {
    "llama-3-8b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        max_positions=8192,
    ),
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_positions=8192,
        tied_embeddings=True,
    ),
    "tiny": ModelConfig(
        architecture="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=RopeConfig(),
        max_positions=4096,
    ),
}


def random_model(
    shape: str, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Transformer:
    """A model of this shape with random weights."""
    return Transformer(SHAPES[shape], dtype, device).randomise(seed)


def transformers_config(c: ModelConfig, **more: Any) -> Any:
    """`transformers`' config of this shape."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tied_embeddings,
        **more,
    )


def transformers_twin(model: Transformer, kind: str, **more: Any) -> Any:
    """`transformers`' model of this class and our shape, with random weights of its own."""
    import transformers

    config = transformers_config(model.config, **more)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device(model.device):
            return getattr(transformers, kind)(config).eval()
    finally:
        torch.set_default_dtype(previous)


def device_ceilings(device: torch.device) -> tuple[float, float]:
    """Measured (bytes a second of a copy, FLOP a second of a bfloat16 matrix product)."""
    if device.type == "cpu":
        x, w = torch.empty(1 << 26, dtype=torch.uint8), torch.randn(512, 512)
        y = torch.empty_like(x)
        copy = seconds(lambda: y.copy_(x), device, 3)
        matmul = seconds(lambda: w @ w, device, 3)
        return 2 * x.numel() / copy, 2 * 512**3 / matmul
    x = torch.empty(1 << 32, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copy = seconds(lambda: y.copy_(x), device, 10)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    matmul = seconds(lambda: a @ a, device, 10)
    return 2 * x.numel() / copy, 2 * 8192**3 / matmul


def seconds(work, device: torch.device, repeats: int) -> float:
    """Median seconds of `work` after a warm-up."""
    times = []
    for i in range(repeats + 2):
        sync(device)
        start = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if start is None:
            import time

            t = time.perf_counter()
            work()
            times.append(time.perf_counter() - t)
            continue
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        sync(device)
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
