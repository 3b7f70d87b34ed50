"""Downloaded models, records and folders are data: none runs code, hangs or leaves its folder."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import main
import suite.chat
from benchmarks import train_reward
from benchmarks.reward_training import backbone
from engine.weights import BadWeights, load_model
from rewards.loading import load_reward_model
from suite.chat import generator_chat, load_tokenizer, stop_ids
from suite.files import write_whole
from suite.model_files import NotAModel, check_folder
from suite.models import ModelSource, resolve
from suite.records import FolderRefused
from tests.test_records import objects, opened, prompts

ROOT = Path(main.__file__).parent


CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_models: Path, tmp_path: Path) -> Path:
    """A copy of a tiny model to spoil."""
    return Path(shutil.copytree(tiny_models / "tiny-llama", tmp_path / "model"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ---- code in a model's folder --------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer_class", [None, "EvilTokenizer"])
def test_code_in_a_folder_is_never_imported(
    model: Path, tmp_path: Path, tokenizer_class: str | None
) -> None:
    """The whole of it loads or is refused: tokenizer, weights, template."""
    ran = tmp_path / "ran"
    (model / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass T: pass\n")
    both = ["modeling_evil.T", "modeling_evil.T"]
    edit(model / "config.json", auto_map={"AutoConfig": both[0], "AutoModelForCausalLM": both[0]})
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": both})
    if tokenizer_class is None:
        chat = generator_chat(resolve(str(model)).ready(), "model")
        assert chat.prompt_ids("a")
    else:
        edit(model / "tokenizer_config.json", tokenizer_class=tokenizer_class)
        with pytest.raises(ValueError, match="tokenizer can't be loaded"):
            load_tokenizer(model)
    load_model(model, torch.float32, CPU)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('touch ' + messages[0].content) }}", "unsafe"),
        ("{{ 'a' * 10 ** 15 }}", "MemoryError"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (
            "{% for i in range(99999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
            "does not end within 0.5 s",
        ),
    ],
)
def test_a_hostile_template_is_one_clear_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    """transformers renders in a sandbox; time, memory and errors are ours to bound."""
    monkeypatch.setattr(suite.chat, "RENDER_SEC", 0.5)
    (model / "chat_template.jinja").write_text(template)
    start = time.monotonic()
    with pytest.raises(ValueError, match=reason):
        generator_chat(model, "model")
    assert time.monotonic() - start < 20


# ---- the trainer's base model --------------------------------------------------------------------


def train(model: Path, out: Path) -> None:
    pairs = out.parent / "pairs.jsonl"
    one = {"prompt": "a", "chosen": "b", "rejected": "c"}
    pairs.write_text("".join(json.dumps({**one, "gid": i}) + "\n" for i in range(4)))
    argv = ["--train", pairs, "--model", model, "--out", out, "--device", "cpu"]
    argv += ["--epochs", 1, "--rank", 2, "--batch_pairs", 2, "--max_length", 96]
    train_reward.main([str(a) for a in argv])


@pytest.mark.parametrize("beside", [False, True])
def test_the_trainer_never_opens_a_pickle(model: Path, tmp_path: Path, beside: bool) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    if not beside:
        (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    if beside:
        train(model, tmp_path / "out")
    else:
        with pytest.raises(ValueError, match=r"pytorch_model\.bin.*convert them to safetensors"):
            train(model, tmp_path / "out")
        _, facts = backbone.load_tokenizer(model)
        with pytest.raises(OSError, match="safetensors"):  # nor past the check
            backbone.load_backbone(model, facts, torch.float32)
    assert not (tmp_path / "ran").exists()


def test_the_trainer_never_imports_code_of_a_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    ran = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass T: pass\n")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    edit(model / "config.json", auto_map=dict.fromkeys(names, "evil.T"))
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    train(model, tmp_path / "out")
    assert not ran.exists() and not asked


def test_the_trainer_follows_no_adapter_to_another_model(model: Path, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "other")}
    (model / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"adapter_config\.json.*merge the adapter"):
        train(model, tmp_path / "out")


def test_the_trainers_base_has_a_bounded_template(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite.chat, "RENDER_SEC", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loop)
    with pytest.raises(ValueError, match=r"does not end within 0\.5 s"):
        train(model, tmp_path / "out")


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "added_tokens.json", "chat_template.jinja"])
def test_files_that_others_parse_have_a_bound(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suite.model_files.LARGEST_JSON_BYTES", 100_000)
    (model / name).write_bytes(b" " * 100_001)
    with pytest.raises(NotAModel, match=f"{name} is larger than 100,000 bytes"):
        check_folder(model, "generator")


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"intermediate_size": 10**15}]
)
def test_a_config_of_absurd_sizes_takes_no_memory(model: Path, change: dict[str, int]) -> None:
    edit(model / "config.json", **change)
    start = time.monotonic()
    with pytest.raises(BadWeights, match="config.json describes"):
        load_model(model, torch.float32, CPU)
    assert time.monotonic() - start < 5


def test_eos_ids_that_are_none_are_left_out(model: Path) -> None:
    """A truth value is an int to Python, and 10**22 none to torch."""
    listed = {"eos_token_id": [True, "x", 10**22, -5, 7, {}, None, 2.0]}
    (model / "generation_config.json").write_text(json.dumps(listed))
    assert stop_ids(model, load_tokenizer(model)) == [2, 7]


def test_nesting_bombs_are_refused(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    (model / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="generation_config.json is not valid JSON"):
        stop_ids(model, tokenizer)
    (model / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="not valid JSON"):
        load_model(model, torch.float32, CPU)


# ---- nothing leaves its folder -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [".lock", ".finished.0.jsonl", ".failures.lock", "failures.jsonl", "record"]
)
def test_links_in_a_runs_folder_are_not_followed(tmp_path: Path, name: str) -> None:
    """An archive from elsewhere may hold them; what they point at stays as it is."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    name = "Tiny-1_RM-2_prompt_0000.json" if name == "record" else name
    (out / name).symlink_to(precious)
    try:
        with opened(out) as run:
            run.finished(prompts(1))
            run.record_failure(prompts(1)[0], "a reason")
            run.write(prompts(1)[0], objects(prompts(1)[0]))
    except FolderRefused as refused:
        assert name == ".lock" and "can't be written" in str(refused)
    except RuntimeError as error:
        assert name == ".failures.lock" and "could not be written" in str(error)
    assert precious.read_text() == "mine"


def test_what_is_written_beside_follows_no_link(tmp_path: Path) -> None:
    """The name of the file beside can be foretold."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    beside = tmp_path / f".a.json.{os.getpid()}.tmp"
    beside.symlink_to(precious)
    write_whole(tmp_path / "a.json", "new")
    assert precious.read_text() == "mine"
    assert (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()


def test_an_adapters_base_keeps_off_the_network_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--local_files_only holds for the model that an adapter names."""
    asked: list[dict[str, Any]] = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append(options)
        raise OSError("scripted")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    shipped = resolve("SmolLM2-135M-Reward", role="reward").folder
    adapter = Path(shutil.copytree(shipped, tmp_path / "adapter"))
    edit(adapter / "config.json", base_model="somebody/something")
    source = resolve(str(adapter), local_files_only=True, role="reward")
    with pytest.raises(ValueError, match="its base model can't be found: .* somebody/something"):
        load_reward_model(source, torch.float32, CPU)
    assert [options["local_files_only"] for options in asked] == [True]


@pytest.mark.parametrize("scaling", [float("nan"), float("inf")])
def test_an_adapter_scaled_by_no_number_is_refused(tmp_path: Path, scaling: float) -> None:
    """It would make every weight NaN, and every prompt a failed one."""
    shipped = resolve("SmolLM2-135M-Reward", role="reward").folder
    adapter = Path(shutil.copytree(shipped, tmp_path / "adapter"))
    edit(adapter / "config.json", lora={"scaling": scaling})
    source = resolve(str(adapter), role="reward")
    with pytest.raises(BadWeights, match="scaling is"):
        load_reward_model(source, torch.float32, CPU)


# ---- the cache of the embedded model -------------------------------------------------------------


@pytest.fixture
def embedded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """An embedded model whose conversion is a copy."""

    def convert(gguf: Path, folder: Path) -> Path:
        if not (folder / "config.json").is_file():
            shutil.copytree(model, folder)
        return folder

    monkeypatch.setattr("engine.gguf.convert_gguf", convert)
    target = tmp_path / "cache" / "embedded"
    return ModelSource("embedded", "embedded", "LlamaForCausalLM", target, tmp_path / "x.gguf")


@pytest.mark.parametrize("damage", ["half", "no weights", "no tokenizer"])
def test_a_damaged_cached_model_is_made_again(embedded: ModelSource, damage: str) -> None:
    folder = embedded.ready()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "half":
        weights.write_bytes(whole[: len(whole) // 2])
    elif damage == "no weights":
        weights.unlink()
    else:
        (folder / "tokenizer.json").unlink()
    assert embedded.ready() == folder
    assert weights.read_bytes() == whole and (folder / "tokenizer.json").is_file()


def test_a_cache_that_can_not_be_made_names_its_variable(
    embedded: ModelSource, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ValueError, match="SPECREJ_CACHE"):
        embedded.ready()


def test_a_cache_that_can_only_be_read_will_do(embedded: ModelSource) -> None:
    folder = embedded.ready()
    lock = folder.parent / ".embedded.lock"
    lock.unlink()
    lock.mkdir()  # can't be opened for writing, not even by the superuser
    assert embedded.ready() == folder


# ---- nothing in the project runs code from a model ----------------------------------------------


def _sources() -> list[Path]:
    """The project's own Python files without the tests; what is hidden is not entered."""
    tops = [p for p in ROOT.iterdir() if p.name != "tests" and not p.name.startswith(".")]
    return [*ROOT.glob("*.py"), *(file for top in tops for file in top.rglob("*.py"))]


def test_no_pickle_and_no_remote_code_in_the_project() -> None:
    words = ("pickle.load", "torch.load(", "weights_only=False", "eval(", "exec(")
    words += ("import pickle", "from pickle", "allow_pickle", "import marshal", "import shelve")
    words += ("import joblib", "torch.jit.load", "os.system(", "shell=True")
    for path in _sources():
        # Said as False it is fine: left out, a tokenizer with code of its own would ask.
        content = path.read_text().replace("trust_remote_code=False", "")
        assert "trust_remote_code" not in content, path
        assert not [w for w in words if re.search(rf"(?<![\w.]){re.escape(w)}", content)], path


def test_every_load_by_transformers_names_what_it_refuses() -> None:
    """Left out, code of the folder would be offered, and a pickle be opened."""
    seen = set()
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr != "from_pretrained":
                continue
            owner = ast.unparse(called.value).rpartition(".")[2]
            said = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert said.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
            if "Tokenizer" not in owner and "Config" not in owner:
                assert said.get("use_safetensors") == "True", f"{path}:{node.lineno}"
            seen.add(path.relative_to(ROOT).parts[0])
    assert seen >= {"suite", "benchmarks"}
