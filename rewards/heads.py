"""From a hidden state to a score: the small heads that make a language model a reward model.

Each head is built from the tensors of a published checkpoint, by their published names, and
computes in float32. No head runs code from a model's repository.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear, relu

from engine.weights import BadWeights

# End of the user's turn and the assistant's header, as ArmoRM's code finds its gating position:
# ids 128009, 128006, 78191, 128007, 271 of Llama 3's vocabulary.
ARMO_HEADER = ("<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "ĊĊ")


class Head(Protocol):
    """`begin` sees the prompt's hidden states once, `score` the candidates' last ones."""

    def begin(self, prompt_hidden: torch.Tensor) -> None:
        """prompt_hidden `[prompt tokens, hidden]`."""

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[candidates, hidden]` to scores `[candidates]` float32."""


@dataclass(slots=True)
class LinearHead:
    """One linear layer at the last token (sequence classification, Eurus, AlpacaFarm)."""

    weight: torch.Tensor  # [1, hidden]
    bias: torch.Tensor | None = None

    def begin(self, prompt_hidden: torch.Tensor) -> None:
        pass

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.float(), self.weight, self.bias)[:, 0]


@dataclass(slots=True)
class GatedHead:
    """ArmoRM (Wang et al. 2024): objectives at the last token, weighted by the prompt's gating.

    score = sum(gating(prompt) * (regression(last) @ transform)), where the gating is
    softmax(mlp(h) / temperature) * logit_scale at the end of the user's turn.
    """

    regression: torch.Tensor  # [objectives, hidden]
    transform: torch.Tensor  # [objectives, objectives]
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    logit_scale: torch.Tensor  # [1]
    temperature: float
    gating: torch.Tensor | None = None  # [objectives]

    def begin(self, prompt_hidden: torch.Tensor) -> None:
        x = prompt_hidden[len(prompt_hidden) - len(ARMO_HEADER)].float()
        for i, (weight, bias) in enumerate(self.layers):
            x = linear(x, weight, bias)
            if i < len(self.layers) - 1:
                x = relu(x)
        self.gating = torch.softmax(x / self.temperature, dim=-1) * self.logit_scale

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.gating is not None, "begin() comes first"
        rewards = linear(hidden.float(), self.regression) @ self.transform
        return (rewards * self.gating).sum(-1)


def head_sha256(head: LinearHead | GatedHead) -> str:
    """Of the head's weights as float32: tells apart reward models that have one name."""
    if isinstance(head, LinearHead):
        tensors = [head.weight, head.bias]
    else:
        layers = itertools.chain.from_iterable(head.layers)
        tensors = [head.regression, head.transform, *layers, head.logit_scale]
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def head_names(architecture: str, config: dict) -> tuple[str, ...]:
    """The tensors that the head of this architecture has beside the backbone."""
    if architecture == "LlamaForRewardModelWithGating":
        layers = range(config.get("gating_n_hidden", 3) + 1)
        gating = [f"gating.layers.{i}.{kind}" for i in layers for kind in ("weight", "bias")]
        return ("regression_layer.weight", "reward_transform_matrix", "gating.logit_scale", *gating)
    if architecture == "EurusRewardModel":
        return ("regression_head.weight",)
    if architecture == "RewardModel":
        return ("reward_head.weight", "reward_head.bias")
    return ("score.weight",)


def build_head(architecture: str, config: dict, tensors: dict[str, torch.Tensor]) -> Head:
    """The head from its tensors (float32). Raises BadWeights where their shapes do not fit."""
    if architecture == "LlamaForRewardModelWithGating":
        return _gated(config, tensors)
    names = head_names(architecture, config)
    weight = tensors[names[0]]
    if weight.shape != (1, config["hidden_size"]):
        raise BadWeights(
            f"{names[0]}: a reward head is (1, {config['hidden_size']}), this one is "
            f"{tuple(weight.shape)}: not a reward model with one score"
        )
    return LinearHead(weight, tensors[names[1]] if len(names) > 1 else None)


def _gated(config: dict, tensors: dict[str, torch.Tensor]) -> GatedHead:
    objectives = config.get("num_objectives", 19)
    wide = config.get("gating_hidden_dim", 1024)
    num_hidden = config.get("gating_n_hidden", 3)
    sizes = [config["hidden_size"], *[wide] * num_hidden, objectives]
    expected = {
        "regression_layer.weight": (objectives, config["hidden_size"]),
        "reward_transform_matrix": (objectives, objectives),
        "gating.logit_scale": (1,),
    }
    for i, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
        expected[f"gating.layers.{i}.weight"] = (size_out, size_in)
        expected[f"gating.layers.{i}.bias"] = (size_out,)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise BadWeights(
                f"{name}: shape {tuple(tensors[name].shape)} in the file, {shape} by the config"
            )
    layers = [
        (tensors[f"gating.layers.{i}.weight"], tensors[f"gating.layers.{i}.bias"])
        for i in range(num_hidden + 1)
    ]
    return GatedHead(
        regression=tensors["regression_layer.weight"],
        transform=tensors["reward_transform_matrix"],
        layers=layers,
        logit_scale=tensors["gating.logit_scale"],
        temperature=config.get("gating_temperature", 10),
    )
