"""The engine's logits and greedy texts against transformers', for every architecture and switch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig, UnsupportedModel
from engine.decode_state import DecodeState
from engine.rope import inverse_frequencies
from engine.sampler import SamplingParams
from engine.weights import BadWeights, load_model, weight_files
from tests.harness import (
    CPU,
    decode_all,
    hidden_states,
    load,
    logits_of,
    new_decoder,
    random_ids,
    reference,
)
from tests.tiny import make_tiny_llama, make_tiny_reward

DTYPES = (torch.float32, torch.bfloat16)
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # within the texts here, so that all bands occur
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, linear rope": {"rope_parameters": LINEAR},
    "llama, llama3 rope": {"rope_parameters": LLAMA3, "head_dim": 64},
    "llama, attention_bias": {"attention_bias": True},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, groups of 1": {"num_key_value_heads": 4},
    "llama, groups of 3": {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
    "llama, groups of 4": {"num_key_value_heads": 1},
    "llama, head_dim 96": {"head_dim": 96},
    "llama, head_dim from hidden_size": {"head_dim": None},
    "mistral": {"arch": "mistral"},
    "qwen2": {"arch": "qwen2"},
    "qwen2, tied": {"arch": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"arch": "qwen3", "head_dim": 24},
    "qwen3, attention_bias": {"arch": "qwen3", "attention_bias": True},
}


@pytest.fixture(scope="module", params=MODELS.items(), ids=lambda item: item[0])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, changes = request.param
    return make_tiny_llama(tmp_path_factory.mktemp("model"), **changes)


def test_logits_equal_those_of_transformers(model_folder: Path) -> None:
    """CASES 33: rope comes from the config, whatever its kind."""
    ids = random_ids(100)
    with torch.inference_mode():
        expected = reference(model_folder)(torch.tensor([ids])).logits[0]
    got = logits_of(load(model_folder), ids)
    assert expected.std() > 0.5, "the model says nothing that could differ"
    assert (got - expected).abs().max() < 2e-5


def test_greedy_text_equals_that_of_transformers(model_folder: Path) -> None:
    prompt = random_ids(17, seed=3)
    model = reference(model_folder)
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=64,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :]
    decoder = new_decoder(
        load(model_folder), stop_ids=(), sampling=SamplingParams(temperature=0.0), max_rows=3
    )
    texts = decode_all(decoder, prompt, range(3), 64)
    assert all(text == expected.tolist() for text in texts.values())
    assert len(set(expected.tolist())) > 5, "a text of few tokens proves little"


def test_decoding_gives_the_logits_of_reading(tmp_path: Path) -> None:
    """The two forward passes agree at every step, over prompt and pages."""
    from engine.ops import TorchOps

    model = load(make_tiny_llama(tmp_path, hidden_size=36, num_attention_heads=6))
    prompt, answer = random_ids(9), random_ids(14, seed=5)
    expected = logits_of(model, prompt + answer)[len(prompt) :]
    decoder = new_decoder(model, max_rows=8)
    with torch.inference_mode():
        decoder.start(prompt, 1, range(2))
        state: DecodeState = decoder.state
        for step, token in enumerate(answer):
            decoder.cache.grow(step + 1)
            state.tokens[:] = token
            state.host_length += 1
            state.before_step()
            hidden = model.decode(TorchOps(), state, slice(0, 8))
            assert (model.logits(hidden)[:2] - expected[step]).abs().max() < 1e-4


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    ids = random_ids(20)
    whole = logits_of(load(folder), ids)
    _shard(folder, 3)
    assert len(weight_files(folder)) == 3
    assert torch.equal(logits_of(load(folder), ids), whole)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(BadWeights, match="part-1.safetensors"):
        load(folder)


def _shard(folder: Path, count: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(count):
        names = sorted(tensors)[part::count]
        save_file({name: tensors[name] for name in names}, folder / f"part-{part}.safetensors")
        weight_map |= dict.fromkeys(names, f"part-{part}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _edit_weights(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing: .*up_proj"),
        (lambda t: t.update(surplus=torch.zeros(2)), "not used: surplus"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(7)}),
            "shape \\(7,\\) in the file, \\(32,\\)",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path, edit, message) -> None:
    """CASES 3: nothing unused, nothing newly initialised."""
    folder = make_tiny_llama(tmp_path)
    _edit_weights(folder, edit)
    with pytest.raises(BadWeights, match=message):
        load(folder)


def test_buffers_of_old_checkpoints_are_no_fault(tmp_path: Path) -> None:
    """CASES 33: old files hold rotary_emb.inv_freq in the layers."""
    folder = make_tiny_llama(tmp_path, tie_word_embeddings=True)
    expected = logits_of(load(folder), [5, 6])

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _edit_weights(folder, edit)
    assert torch.equal(logits_of(load(folder), [5, 6]), expected)


def test_corrupt_weights_are_named(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(BadWeights, match="download it again"):
        load(folder)


@pytest.mark.parametrize("index", ["[]", "{}", "not json", '{"weight_map": {"a": "../x"}}'])
def test_a_bad_weight_index_is_named(tmp_path: Path, index: str) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadWeights):
        load(folder)


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadWeights, match="convert them to safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(BadWeights, match="no \\*.safetensors"):
        load(folder)


BASE = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llama, mistral"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "yarn.*default, linear, llama3"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_layers must be a whole number, got 'two'"),
        ({"head_dim": 7}, "head_dim"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
    ],
)
def test_a_config_that_the_engine_does_not_compute_is_refused(change, message) -> None:
    raw = {key: value for key, value in {**BASE, **change}.items() if value is not None}
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_config_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="needs one"):
        ModelConfig.from_folder(tmp_path / "nowhere")


def test_configs_of_transformers_4_and_5_say_the_same() -> None:
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {**BASE, "rope_parameters": LLAMA3}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict({**BASE, "rope_theta": 7.0}).rope.theta == 7.0


def test_a_sliding_window_bounds_the_length() -> None:
    mistral = {**BASE, "model_type": "mistral", "max_position_embeddings": 32768}
    assert ModelConfig.from_dict({**mistral, "sliding_window": 4096}).max_positions == 4096
    assert ModelConfig.from_dict({**mistral, "sliding_window": None}).max_positions == 32768
    qwen = {**mistral, "model_type": "qwen2", "sliding_window": 4096}
    assert ModelConfig.from_dict({**qwen, "use_sliding_window": False}).max_positions == 32768


def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = make_tiny_llama(tmp_path / str(tied), tie_word_embeddings=tied)
        matrices = sum(p.numel() for p in reference(folder).parameters() if p.dim() == 2)
        model = load(folder)
        assert model.config.num_params == matrices
        norms = (2 * model.config.num_layers + 1) * model.config.hidden_size
        assert model.weight_bytes == 4 * (matrices + norms)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaled = ModelConfig.from_dict({**BASE, "rope_parameters": LLAMA3}).rope
    plain = ModelConfig.from_dict({**BASE, "rope_theta": 500000.0}).rope
    ratio = inverse_frequencies(plain, 64) / inverse_frequencies(scaled, 64)
    assert ratio[0] == 1 and abs(ratio[-1] - 8) < 1e-5
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_a_reward_model_leaves_out_the_output_matrix(tmp_path: Path) -> None:
    folder = make_tiny_reward(tmp_path)
    model, head = load_model(folder, torch.float32, CPU, head_names=("score.weight",))
    assert head["score.weight"].shape == (1, 32)
    with pytest.raises(BadWeights, match=r"not used: score\.weight"):
        load_model(folder, torch.float32, CPU)
    assert hidden_states(model, [4, 5, 6]).shape == (3, 32)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    ids = random_ids(30)
    exact, rounded = (logits_of(load(folder, d), ids).float() for d in DTYPES)
    assert (exact - rounded).abs().mean() < 0.1 * exact.abs().mean()
