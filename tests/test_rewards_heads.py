"""Heads and checkpoints that do not fit are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import UnsupportedModel
from engine.weights import BadWeights
from tests.harness import build_reward
from tests.reward_models import (
    make_armo,
    make_eurus,
    make_farm,
)
from tests.tiny import make_tiny_llama, make_tiny_reward


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (make_tiny_reward, lambda t: t.pop("score.weight"), "missing: score.weight"),
        (make_tiny_reward, lambda t: t.update(other=torch.zeros(1)), "not used: other"),
        (make_armo, lambda t: t.pop("gating.layers.2.bias"), "missing: gating.layers.2.bias"),
        (make_armo, lambda t: t.update({"score.weight": torch.zeros(1, 32)}), "not used: score"),
        (
            make_armo,
            lambda t: t.update({"gating.layers.4.weight": torch.zeros(3, 3)}),
            "not used: gating",
        ),
        (
            make_armo,
            lambda t: t.update({"reward_transform_matrix": torch.zeros(19, 18)}),
            "shape \\(19, 18\\)",
        ),
        (
            make_armo,
            lambda t: t.update({"gating.layers.1.weight": torch.zeros(24, 23)}),
            r"gating\.layers\.1\.weight",
        ),
        (make_eurus, lambda t: t.pop("regression_head.weight"), "missing: regression_head"),
        (
            make_eurus,
            lambda t: t.update({"regression_head.weight": torch.zeros(2, 32)}),
            "not a reward model with one score",
        ),
        (make_farm, lambda t: t.pop("reward_head.bias"), "missing: reward_head.bias"),
        (
            make_farm,
            lambda t: t.update({"score.weight": torch.zeros(1, 32)}),
            "not used: score.weight",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_an_error(tmp_path: Path, make, change, message) -> None:
    """CASES 3: unused or missing head weights are never a warning."""
    folder = edit(make(tmp_path / "model"), change)
    with pytest.raises(BadWeights, match=message):
        build_reward(folder)


def test_two_labels_are_an_error(tmp_path: Path) -> None:
    """By the config, or (transformers leaves two labels out of it) by the head's shape."""
    with pytest.raises(ValueError, match="one label"):
        build_reward(make_tiny_reward(tmp_path / "three", num_labels=3))
    folder = make_tiny_reward(tmp_path / "two", num_labels=2)
    assert "id2label" not in json.loads((folder / "config.json").read_text())
    with pytest.raises(BadWeights, match=r"this one is \(2, 32\)"):
        build_reward(folder)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a reward head"):
        build_reward(make_tiny_llama(tmp_path))


def test_armo_with_another_template_is_refused(tmp_path: Path) -> None:
    folder = make_armo(tmp_path)
    from tests.tiny import CHAT_TEMPLATE

    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with pytest.raises(ValueError, match="take the published tokenizer"):
        build_reward(folder)


def test_farm_without_its_base_beside_it_says_so(tmp_path: Path) -> None:
    folder = make_farm(tmp_path / "model", with_sizes=False)
    shutil.rmtree(tmp_path / "llama-7b-base")
    with pytest.raises(UnsupportedModel, match=r"llama-7b-base\) beside it"):
        build_reward(folder)
