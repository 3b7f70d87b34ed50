"""Rotary position embeddings from the config: default, linear and llama3 scaling.

Tables are computed once in float32. Pairs are the two halves of a head (HF's "rotate half").
"""

from __future__ import annotations

import math

import torch

from engine.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Frequencies of the rotation of each pair, `[head_dim / 2]` float32, radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def rope_tables(
    rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, each `[max_positions, head_dim / 2]` float32."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x [tokens, heads, head_dim]` by tables `[tokens, head_dim / 2]` of its positions."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
