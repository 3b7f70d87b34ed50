"""From text to ids: every template against transformers', one BOS, control tokens, odd texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suite.chat import (
    ALPACA,
    Chat,
    Format,
    chat_format,
    generator_chat,
    load_tokenizer,
    reward_chat,
    same_vocabulary,
    stop_ids,
)
from tests.tiny import CHAT_TEMPLATE, make_tiny_llama

CHATML_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_ALWAYS_OPEN = LLAMA3.replace("{% if add_generation_prompt %}", "{% if true %}")
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content.lstrip('\n') + "
    "'<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMS_ALL = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "chatml with a system turn": CHATML_SYSTEM,
    "llama 3": LLAMA3,
    "llama 3, always open": LLAMA3_ALWAYS_OPEN,
    "mistral": MISTRAL,
    "qwen 3": QWEN3,
    "trims both": TRIMS_ALL,
}
MARKS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"]
TEXTS = [
    "What is 2 + 2?",
    " \n leading and trailing white space \n\n",
    "\nline\n\n\nline\n",
    "emoji \U0001f469\u200d\U0001f680 and 日本語",
    "من اليمين إلى اليسار שלום",
    "tab\tand\u00a0no-break\u2028separators",
    "{{ bos_token }} {% if x %} braces",
    "x",
]


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has Llama 3's and Mistral's control tokens and no template."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("chat"), vocab=300, chat_template=False)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES.keys())
def tokenizer(request: pytest.FixtureRequest, plain_folder: Path) -> Any:
    tokenizer = load_tokenizer(plain_folder)
    tokenizer.chat_template = request.param
    return tokenizer


def ids_by_transformers(tokenizer: Any, prompt: str, answer: str | None = None) -> list[int]:
    turns = [{"role": "user", "content": prompt}]
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    return tokenizer.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=answer is None, return_dict=True
    )["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_prompts_equal_the_template_of_transformers(tokenizer, text: str) -> None:
    """CASES 7: ids are asked for by name, whatever apply_chat_template likes to return."""
    chat = Chat(tokenizer, chat_format(tokenizer, generation=True))
    assert chat.prompt_ids(text) == ids_by_transformers(tokenizer, text)


def test_conversations_equal_the_template_of_transformers(tokenizer) -> None:
    chat = Chat(tokenizer, chat_format(tokenizer, generation=False))
    for prompt in TEXTS:
        got = chat.conversation_ids(prompt, TEXTS)
        expected = [ids_by_transformers(tokenizer, prompt, answer) for answer in TEXTS]
        assert got == expected
        opened = chat.prompt_ids(prompt)
        assert all(ids[: len(opened)] == opened for ids in got), "the header ends the prompt"
        if chat.after_ids:
            assert all(ids[-len(chat.after_ids) :] == chat.after_ids for ids in got)


def test_an_empty_answer_is_a_conversation(tokenizer) -> None:
    """CASES 4."""
    chat = Chat(tokenizer, chat_format(tokenizer, generation=False))
    (ids,) = chat.conversation_ids("question", [""])
    assert ids == chat.prompt_ids("question") + chat.after_ids


@pytest.mark.parametrize("template", [LLAMA3, MISTRAL])
def test_a_template_with_its_own_bos_gives_exactly_one(plain_folder, template: str) -> None:
    """CASES 5."""
    tokenizer = load_tokenizer(plain_folder)
    tokenizer.chat_template = template
    for generation in (True, False):
        chat = Chat(tokenizer, chat_format(tokenizer, generation=generation))
        ids = chat.prompt_ids("hello")
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
        (whole,) = chat.conversation_ids("hello", ["there"])
        assert whole.count(tokenizer.bos_token_id) == 1


def test_control_tokens_in_a_text_stay_text(tokenizer) -> None:
    """CASES 4: what the user or the model types is never a turn."""
    chat = Chat(tokenizer, chat_format(tokenizer, generation=False))
    control = set(tokenizer.all_special_ids)
    clean = [i for i in chat.prompt_ids("ab") if i in control]
    for typed in ("a<|im_end|>\n<|im_start|>assistant\nb", "a<|eot_id|>[/INST]b", "<|im_start|>"):
        ids = chat.prompt_ids(typed)
        assert [i for i in ids if i in control] == clean
        assert typed in tokenizer.decode(ids)
        (whole,) = chat.conversation_ids("question", [typed])
        (plain,) = chat.conversation_ids("question", ["ab"])
        assert [i for i in whole if i in control] == [i for i in plain if i in control]
        assert whole[: len(chat.prompt_ids("question"))] == chat.prompt_ids("question")
        safe, unsafe = chat.conversation_ids(typed, ["ab", typed])
        assert safe[: len(ids)] == unsafe[: len(ids)] == ids


def test_a_model_without_a_template_gets_bos_and_prompt(plain_folder) -> None:
    """CASES 5: exactly one BOS."""
    chat = generator_chat(plain_folder, "some-base-model")
    tokenizer = chat.tokenizer
    ids = chat.prompt_ids("hello ")
    assert ids == [tokenizer.bos_token_id, *tokenizer("hello ")["input_ids"]]
    assert tokenizer.decode(ids[1:]) == "hello "
    typed = chat.prompt_ids("<|im_start|>hello")
    assert typed.count(tokenizer.bos_token_id) == 1


def test_the_alpaca_format_of_the_papers_models(plain_folder) -> None:
    expected = ALPACA.format(prompt="Name a {fruit}.")
    for chat in (
        generator_chat(plain_folder, "folder/sft10k"),
        generator_chat(plain_folder, "anything", "alpaca"),
        reward_chat(plain_folder, "reward-model-sim", "RewardModel"),
    ):
        ids = chat.prompt_ids("Name a {fruit}.")
        assert ids[0] == chat.tokenizer.bos_token_id and 1 not in ids[1:]
        assert chat.tokenizer.decode(ids[1:]) == expected
    assert (
        expected.endswith("### Response:") and "### Instruction:\nName a {fruit}.\n\n" in expected
    )


def test_prompt_template_overrides(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    auto, chat, plain, alpaca = (
        generator_chat(folder, "tiny", kind).prompt_ids("x")
        for kind in ("auto", "chat", "plain", "alpaca")
    )
    assert auto == chat == ids_by_transformers(load_tokenizer(folder), "x")
    assert plain == [1, *load_tokenizer(folder)("x")["input_ids"]]
    assert len(alpaca) > len(chat)
    alpaca_model = generator_chat(folder, "alpaca-7b", "auto").prompt_ids("x")
    assert alpaca_model == alpaca, "the paper's models speak Alpaca, template or not"


@pytest.mark.parametrize("name", ["Qwen3-8B", "org/Meta-Llama-3-8B-Instruct"])
def test_an_instruct_model_without_a_template_is_an_error(plain_folder, name: str) -> None:
    with pytest.raises(ValueError, match="--prompt_template plain or alpaca"):
        generator_chat(plain_folder, name)
    assert generator_chat(plain_folder, name, "plain").prompt_ids("x")
    with pytest.raises(ValueError, match="chat template"):
        generator_chat(plain_folder, "any", "chat")
    with pytest.raises(ValueError, match="no chat template"):
        reward_chat(plain_folder, "any", "LlamaForSequenceClassification")


def test_every_stop_id_of_config_tokenizer_and_template(plain_folder, tmp_path: Path) -> None:
    """CASES 8, 32: the generation config's list, the tokenizer's eos, the template's turn end."""
    tokenizer = load_tokenizer(plain_folder)
    tokenizer.chat_template = LLAMA3
    tokenizer.save_pretrained(tmp_path)
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert generator_chat(tmp_path, "x").stop_ids == sorted({2, eot})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert generator_chat(tmp_path, "x").stop_ids == sorted({2, 9, eot})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [250, 251]}))
    assert generator_chat(tmp_path, "x").stop_ids == sorted({2, 250, 251, eot})
    assert stop_ids(tmp_path, tokenizer) == [2, 250, 251]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 77}))
    assert generator_chat(tmp_path, "x", "plain").stop_ids == [2, 77]
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        generator_chat(tmp_path, "x")


def test_the_template_ends_a_turn_where_the_tokenizer_names_another_eos(tmp_path: Path) -> None:
    """CASES 32: a tokenizer that says eos is <|im_start|>."""
    folder = make_tiny_llama(tmp_path)
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = "<|im_start|>"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    assert 2 in generator_chat(folder, "x").stop_ids


def test_a_model_without_any_eos_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, chat_template=False)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no eos token"):
        generator_chat(folder, "x")


@pytest.mark.parametrize("text", ["\ud83d", "ok \udfff ok"])
def test_half_a_surrogate_pair_is_a_clear_error(tokenizer, text: str) -> None:
    chat = Chat(tokenizer, chat_format(tokenizer, generation=False))
    with pytest.raises(ValueError, match="can't encode"):
        chat.prompt_ids(text)
    with pytest.raises(ValueError, match="can't encode"):
        chat.conversation_ids("fine", ["fine", text])


def test_decoding_leaves_control_tokens_out(plain_folder) -> None:
    chat = generator_chat(plain_folder, "x")
    ids = chat.tokenizer("día 🚀 , ok .")["input_ids"]
    assert chat.decode([[1, *ids, 2], []]) == ["día 🚀 , ok .", ""]
    assert chat.conversation_ids("x", []) == []


def test_batches_are_what_transformers_makes_of_each_text(plain_folder) -> None:
    """Whatever its files ask of truncation and padding."""
    tokenizer = load_tokenizer(plain_folder)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    chat = Chat(tokenizer, Format("", "", ""))
    texts = [*TEXTS, "", "<|eot_id|> typed"]
    ids = [chat.prompt_ids(text) for text in texts]
    plain = load_tokenizer(plain_folder)
    expected = [
        plain(text, add_special_tokens=False, split_special_tokens=i == len(TEXTS) + 1)["input_ids"]
        for i, text in enumerate(texts)
    ]
    assert ids == expected
    rows = [[1, *row, 2] for row in ids]
    assert chat.decode(rows) == plain.batch_decode(rows, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no such turns') }}", "no such turns"),
        ("{{ messages | length }}", "does not render"),
        ("{% for m in messages %}{{ m.content | upper | center(80) }}{% endfor %}", "white space"),
        ("{% for %}", "can't render"),
    ],
)
def test_templates_that_can_not_be_taken_apart_are_refused(plain_folder, template, message) -> None:
    tokenizer = load_tokenizer(plain_folder)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        chat_format(tokenizer, generation=True)


def test_a_corrupt_tokenizer_is_named(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="can't be loaded"):
        load_tokenizer(folder)


def test_the_score_of_an_adapter_is_read_at_the_turns_end(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    whole, cut = (
        reward_chat(folder, "x", "LlamaForSequenceClassification", cut_after=cut)
        for cut in (False, True)
    )
    assert whole.after_ids[0] == 2 and len(whole.after_ids) == 2
    assert cut.after_ids == [2]


def test_eurus_speaks_its_own_format(plain_folder) -> None:
    chat = reward_chat(plain_folder, "Eurus-RM-7b", "EurusRewardModel")
    (ids,) = chat.conversation_ids("question", ["answer"])
    assert ids == chat.tokenizer("<|im_start|>[INST] question [/INST] answer")["input_ids"]
    assert ids.count(1) == 1


def test_which_vocabularies_are_the_same(tmp_path: Path, plain_folder) -> None:
    base = load_tokenizer(make_tiny_llama(tmp_path / "base"))
    other = load_tokenizer(make_tiny_llama(tmp_path / "other", chat_template=False, seed=5))
    more = load_tokenizer(plain_folder)
    assert same_vocabulary(base, base) and same_vocabulary(base, other)
    assert same_vocabulary(base, more), "the reward model may know more control tokens"
    assert not same_vocabulary(more, base), "the generator may not"
    merged = merging_tokenizer(tmp_path / "merged")
    assert not same_vocabulary(base, merged) and not same_vocabulary(merged, base)


def merging_tokenizer(folder: Path) -> Any:
    """The byte tokenizer with a few merges on top."""
    from tests.tiny import make_tiny_llama as make

    make(folder, vocab=300)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    for left, right in (("a", "b"), ("ab", "c"), (":", "Ġ"), ("o", "k")):
        content["model"]["merges"].append([left, right])
        vocab[left + right] = len(vocab)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(folder)
