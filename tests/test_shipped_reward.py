"""The shipped reward model, through our engine: fixed scores, fixed rankings, peft agrees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import main
from engine.candidates import Candidate, End
from engine.kv_cache import PagedKV
from engine.ops import TorchOps
from engine.reader import Reader
from rewards.loading import load_reward_model
from rewards.model_reward import ModelReward
from rewards.value_head import load_value_head
from suite.models import SHIPPED_REWARDS, resolve

NAME = "SmolLM2-135M-Reward"
# Prompt, good answer, bad answer, and their scores by transformers + peft (float32, CPU).
TRIPLES = [
    (
        "What is the capital of France?",
        "The capital of France is Paris. It lies on the river Seine and is home to about two "
        "million people.",
        "I don't know, maybe London or something. Why do you ask me that?",
        (1.21334, -1.98594),
    ),
    (
        "Give me three tips for sleeping better.",
        "1. Go to bed at the same time every night.\n2. Keep your bedroom dark, quiet and cool.\n"
        "3. Avoid screens and caffeine in the hours before bed.",
        "Sleep sleep sleep sleep sleep sleep sleep. Bed is bed. You should just sleep more, it is "
        "not that hard.",
        (1.20699, -1.8436),
    ),
    (
        "How do I make a cup of tea?",
        "Boil fresh water, put a tea bag in a cup and pour the water over it. Let it steep for "
        "three to five minutes, then take the bag out and add milk or sugar to taste.",
        "You can make tea by by by using the using the tea. Asdf qwer zxcv.",
        (0.76028, -1.62038),
    ),
]


def make_reward(dtype: torch.dtype) -> ModelReward:
    model = load_reward_model(resolve(NAME, role="reward"), dtype, torch.device("cpu"))
    cache = PagedKV(
        model.backbone.config,
        num_pages=0,
        page_size=16,
        max_rows=0,
        max_row_tokens=0,
        max_prompt=512,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    reader = Reader(model.backbone, TorchOps(), cache, keep=False, chunk_tokens=2048)
    return ModelReward(reader, model.head, model.chat, None)


@pytest.fixture(scope="module")
def reward() -> ModelReward:
    return make_reward(torch.float32)


def score(reward: ModelReward, prompt: str, answers: list[str]) -> list[float]:
    reward.begin(prompt)
    ids = [reward.chat.tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers]
    candidates = [
        Candidate(i, tokens=np.asarray(tokens, dtype=np.int32), end=End.LENGTH)
        for i, tokens in enumerate(ids)
    ]
    return reward.score(candidates)


@pytest.mark.parametrize("prompt, good, bad, expected", TRIPLES)
def test_good_answers_rank_above_bad_ones_at_the_published_scores(
    reward, prompt, good, bad, expected
):
    scores = score(reward, prompt, [good, bad])
    assert scores[0] > scores[1] + 1.0
    assert scores == pytest.approx(expected, abs=1e-3)


def test_bfloat16_keeps_the_rankings():
    """What a GPU loads; bfloat16 moves a score by a few hundredths."""
    rounded = make_reward(torch.bfloat16)
    for prompt, good, bad, expected in TRIPLES[:1]:
        scores = score(rounded, prompt, [good, bad])
        assert scores[0] > scores[1] + 1.0
        assert scores == pytest.approx(expected, abs=0.15)


def test_the_adapter_is_small_and_documented():
    folder = Path(SHIPPED_REWARDS[NAME])
    assert sum(p.stat().st_size for p in folder.glob("*.safetensors")) <= 12_000_000
    assert {"README.md", "LICENSE", "config.json"} <= {p.name for p in folder.iterdir()}
    config = json.loads((folder / "config.json").read_text())
    assert config["base_model"] == "SmolLM2-135M-Instruct"


def test_engine_and_peft_agree(reward):
    """The whole path again by other people's code: transformers' classifier with peft's adapter."""
    from benchmarks.reward_training.package import load_package

    folder = Path(SHIPPED_REWARDS[NAME])
    base = resolve("SmolLM2-135M-Instruct").ready()
    theirs, _, _ = load_package(folder, base, torch.device("cpu"))
    for prompt, good, bad, _ in TRIPLES:
        ours = score(reward, prompt, [good, bad])
        for answer, mine in zip((good, bad), ours, strict=True):
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            text = reward.chat.tokenizer.apply_chat_template(turns, tokenize=False).rstrip()
            ids = reward.chat.tokenizer(text, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                other = theirs(torch.tensor([ids]), torch.tensor([len(ids) - 1]))
            assert float(other.reshape(-1)[0]) == pytest.approx(mine, abs=1e-3)


def test_the_shipped_value_head_belongs_to_the_shipped_model(reward):
    head = load_value_head(str(Path(SHIPPED_REWARDS[NAME]) / "value_head.safetensors"))
    assert head.provenance["reward_head_sha256"] == reward.head_sha256
    head.check(NAME, reward.hidden_size, reward.head_sha256)


def test_the_shipped_value_head_ranks_a_real_run(tmp_path):
    """It belongs to the shipped reward model; its values, not the scores, decide who is cut."""
    head = str(Path(SHIPPED_REWARDS[NAME]) / "value_head.safetensors")
    given = ["--num_prompts", "1", "--max_gen_tokens", "40", "--speculative_rejection", "--refill"]
    given += ["--init_batch_size", "4", "--schedule", "fixed:16", "--value_head", head]
    given += ["--kv_cache_gb", "0.2", "--output_folder", str(tmp_path / "run")]
    assert main.main(given) == 0
    (made,) = json.loads(next((tmp_path / "run").glob("*_prompt_*.json")).read_text())
    first = made["rounds"][0]
    assert len(first["values"]) == len(first["scores"]) == 4
    assert first["values"] != first["scores"]
    assert first["kept"] == 2
    assert first["cutoff"] == sorted(first["values"])[-2]
