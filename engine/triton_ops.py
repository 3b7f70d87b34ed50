"""The GPU backend: our Triton kernels for decoding, FlashAttention for packed sequences.

Same interface and results as `TorchOps`, its slow twin, for bfloat16 and float16. Decode attention
has two levels: all rows on the one prompt, each row on its own pages. Importing this needs Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from engine.decode_state import DecodeState
from engine.kernels import activation, norm
from engine.kernels.attention import (
    AttentionPlan,
    AttentionWorkspace,
    decode_attention,
    make_workspace,
    plan_attention,
)
from engine.kernels.packed import gather_keys, rotate_in_place
from engine.kernels.rope_append import rope_append
from engine.kernels.sample import DeviceSampler
from engine.ops import TorchOps
from engine.sampler import SamplingParams

if TYPE_CHECKING:
    from engine.model import Transformer
    from engine.packing import Packing


class TritonOps(TorchOps):
    """Fused kernels; what is not overridden is the reference's."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], AttentionPlan] = {}
        self._workspaces: list[AttentionWorkspace] = []  # growing; the last one is in use

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return norm.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)

    def decode_attention(
        self, model: Transformer, layer: int, qkv: torch.Tensor, state: DecodeState, rows: slice
    ) -> torch.Tensor:
        cache, weights = state.cache, model.layers[layer]
        table = cache.table[rows]
        q = rope_append(
            qkv,
            model.cos,
            model.sin,
            state.prompt_len,
            state.length,
            cache.k[layer],
            cache.v[layer],
            table,
            weights.q_norm,
            weights.k_norm,
            model.config.norm_eps,
        )
        plan = self._plan(model, state, len(qkv))
        return decode_attention(
            q,
            cache.k[layer],
            cache.v[layer],
            table,
            state.length,
            cache.prompt_k[layer],
            cache.prompt_v[layer],
            state.prompt_len,
            plan,
            self._workspaces[-1],
        )

    def _plan(self, model: Transformer, state: DecodeState, rows: int) -> AttentionPlan:
        """The launch for this many rows and this class of prompt lengths."""
        prompt_tokens = prompt_class(state.cache.prompt_len)
        key = (rows, prompt_tokens)
        if key not in self._plans:
            c = model.config
            plan = plan_attention(
                rows,
                c.num_heads,
                c.num_kv_heads,
                model.dtype,
                prompt_tokens,
                _num_multiprocessors(model.device),
            )
            self._plans[key] = plan
            self._reserve(model, plan, rows)
        return self._plans[key]

    def _reserve(self, model: Transformer, plan: AttentionPlan, rows: int) -> None:
        """A workspace that serves this plan too.

        NOTE: the old ones stay: a recorded graph writes to the one it was recorded with.
        """
        c = model.config
        if self._workspaces and self._workspaces[-1].serves(plan, rows, c.num_heads):
            return
        self._workspaces.append(
            make_workspace({rows: plan}, c.num_heads, c.head_dim, model.dtype, model.device)
        )

    def packed_attention(
        self, model: Transformer, layer: int, qkv: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        c, weights = model.config, model.layers[layer]
        qkv = qkv.view(len(qkv), -1, c.head_dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if c.qk_norm:
            q.copy_(super().rms_norm(q, weights.q_norm, c.norm_eps))
            k.copy_(super().rms_norm(k, weights.k_norm, c.norm_eps))
        rotated = qkv[:, : c.num_heads + c.num_kv_heads]
        rotate_in_place(rotated, model.cos, model.sin, packing.positions)
        self.store(layer, k, v, packing)
        if packing.keys is not None:
            k, v = gather_keys(layer, k, v, packing)
        return flash_varlen(q, k, v, packing).flatten(1)


def flash_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing
) -> torch.Tensor:
    """FlashAttention of packed sequences, causal, aligned at their ends: `[T, heads, dim]`.

    PyTorch's own FlashAttention-2 kernel, by its operator: the public wrappers do not take keys
    that are longer than their queries. It wants heads of whole eights: others are padded.
    """
    dim = q.shape[-1]
    padded = [pad(x, (0, -dim % 8)) if dim % 8 else x for x in (q, k, v)]
    return torch.ops.aten._flash_attention_forward(
        *padded,
        packing.cu_new,
        packing.cu_keys,
        max(packing.new_lens),
        max(packing.key_lens),
        0.0,  # dropout
        True,  # causal
        False,  # no debug mask
        scale=dim**-0.5,
    )[0][..., :dim]


class TritonSampler:
    """The device's sampler: nothing of a step waits for the host."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._sample = DeviceSampler(params, vocab_size, max_rows, device)

    def __call__(self, logits: torch.Tensor, state: DecodeState, rows: slice) -> None:
        self._sample(
            logits,
            state.stream_key,
            state.candidates[rows],
            state.step,
            state.history[rows],
            state.next_tokens[rows],
            state.done[rows],
            state.bad[rows],
            state.stop_ids,
            state.block_step,
        )


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def prompt_class(prompt_len: int) -> int:
    """A prompt length that stands for this one when a launch is chosen."""
    return next(n for n in (512, 4096, 1 << 30) if prompt_len <= n) if prompt_len else 0
