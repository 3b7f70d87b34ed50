"""Reward models against their scores worked out apart: kinds, rounds, tokenizers, odd answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.candidates import Candidate, End
from rewards.model_reward import ModelReward, SelfReward
from suite.chat import generator_chat
from tests.harness import build_reward, load, new_reader, reference
from tests.reward_models import (
    armo_score,
    classifier_scores,
    eurus_score,
    farm_score,
    make_armo,
    make_eurus,
    make_farm,
    merge_tokens,
)
from tests.search import run_search
from tests.tiny import make_tiny_llama, make_tiny_reward

TOLERANCE = 1e-4
PROMPT = "Name a colour of the sky, and say why."
ANSWERS = ["Blue.", "", "\n\nAs a poet:\n it is grey", "abcabcabc ok: ok", "x" * 90, "é 🚀 يمين"]
Score = Callable[[Path, list[int]], float]


def classifier_score(folder: Path, ids: list[int]) -> float:
    return classifier_scores(folder, [ids], "right")[0]


KINDS: dict[str, tuple[Callable[[Path], Path], Score]] = {
    **{
        arch: (lambda folder, arch=arch: make_tiny_reward(folder, arch=arch), classifier_score)
        for arch in ("llama", "mistral", "qwen2", "qwen3")
    },
    "armo": (make_armo, armo_score),
    "eurus": (make_eurus, eurus_score),
    "farm": (make_farm, farm_score),
    "farm without sizes": (lambda folder: make_farm(folder, with_sizes=False), farm_score),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, its score of token ids by plain torch)."""
    make, score = KINDS[request.param]
    return make(tmp_path_factory.mktemp("reward") / "model"), score


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return generator_chat(make_tiny_llama(tmp_path_factory.mktemp("generator")), "tiny")


def candidate(index: int, ids: list[int], end: End = End.RUNNING) -> Candidate:
    return Candidate(index, np.asarray(ids, dtype=np.int32), end)


def candidates(generator: Any, texts: list[str]) -> list[Candidate]:
    """Answers as the generator's ids; every other one has stopped."""
    encode = generator.tokenizer
    return [
        candidate(i, [*encode(text)["input_ids"], 2], End.STOP)
        if i % 2
        else candidate(i, encode(text)["input_ids"])
        for i, text in enumerate(texts)
    ]


def from_scratch(reward: ModelReward, folder: Path, score: Score, texts: list[str]) -> list[float]:
    """The text of each whole conversation, tokenised at once, by plain torch."""
    return [score(folder, ids) for ids in reward.chat.conversation_ids(PROMPT, texts)]


@pytest.mark.parametrize("keep", [True, False])
def test_scores_equal_those_of_the_published_models(kind, generator, keep: bool) -> None:
    """CASES 3, 4: among them an empty answer and one with leading newlines."""
    folder, score = kind
    reward = build_reward(folder, generator.decode, keep=keep)
    reward.begin(PROMPT)
    got = reward.score(candidates(generator, ANSWERS))
    expected = from_scratch(reward, folder, score, ANSWERS)
    assert got == pytest.approx(expected, abs=TOLERANCE)
    assert np.std(expected) > 0.05, "answers that all score alike show nothing"


def test_every_conversation_has_one_bos_where_the_format_has_one(kind) -> None:
    """CASES 5."""
    folder, _ = kind
    chat = build_reward(folder).chat
    for ids in chat.conversation_ids(PROMPT, ANSWERS):
        bos = chat.tokenizer.bos_token_id
        if chat.tokenizer.chat_template and "bos_token" not in chat.tokenizer.chat_template:
            assert ids.count(bos) == 2, "ChatML: one a turn, none in front"
        else:
            assert ids[0] == bos and ids.count(bos) == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_padding_has_no_effect(tmp_path: Path, generator, arch: str, side: str) -> None:
    """CASES 1: transformers' padded batch on either side, against our packed reading."""
    folder = make_tiny_reward(tmp_path, arch=arch)
    reward = build_reward(folder)
    reward.begin(PROMPT)
    mine = candidates(generator, ANSWERS)
    sequences = [ids.tolist() for ids in reward._ids(mine)]
    expected = classifier_scores(folder, sequences, side)
    assert reward.score(mine) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("decode", [True, False], ids=["text", "ids"])
def test_chunks_of_1_7_and_64_have_one_winner(tmp_path: Path, generator, decode: bool) -> None:
    """CASES 2: 64 answers, three chunk sizes, both orders."""
    folder = make_tiny_reward(tmp_path)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc ok:"), rng.integers(1, 60))) for _ in range(64)]
    mine = candidates(generator, texts)
    results = []
    for chunk in (1, 7, 64, 4096):
        for order in (mine, mine[::-1]):
            reward = build_reward(folder, generator.decode if decode else None, chunk_tokens=chunk)
            reward.begin(PROMPT)
            scores = dict(zip([c.index for c in order], reward.score(order), strict=True))
            results.append([scores[i] for i in range(64)])
    assert len({int(np.argmax(scores)) for scores in results}) == 1
    assert np.ptp(np.asarray(results), axis=0).max() < TOLERANCE


@pytest.mark.parametrize("merges", [False, True], ids=["same ids", "merging tokenizer"])
def test_five_rounds_equal_scoring_from_scratch(tmp_path: Path, generator, merges: bool) -> None:
    """Growing answers with drops and forks; with merges the border of a round is re-read."""
    folder = make_tiny_reward(tmp_path, vocab=320)
    if merges:
        merge_tokens(folder, ["abc", "ok", ":Ġ", "caok", "Ċa", "bb"])
    reward = build_reward(folder, generator.decode if merges else None)
    reward.begin(PROMPT)
    rng = np.random.default_rng(5)
    texts = {i: "" for i in range(10)}
    read_again = 0
    for round_ in range(5):
        for i in texts:
            texts[i] += "".join(rng.choice(list("abcok: \n"), 1 + (i + round_) % 9))
        live = [candidate(i, generator.tokenizer(t)["input_ids"]) for i, t in texts.items()]
        got = reward.score(live)
        expected = from_scratch(reward, folder, classifier_score, list(texts.values()))
        assert got == pytest.approx(expected, abs=TOLERANCE)
        conversations = reward.chat.conversation_ids(PROMPT, list(texts.values()))
        read_again += sum(map(len, conversations))
        texts = {i: t for i, t in texts.items() if i % 5 != round_}
        reward.keep_only(list(texts))
        parents = list(texts)[-2:]
        children = [100 * (round_ + 1) + n for n in range(2)]
        reward.fork(parents, children)
        texts |= {c: texts[p] for c, p in zip(children, parents, strict=True)}
    assert reward.kv_bytes > 0
    assert reward.tokens_read < 0.5 * read_again


def test_ids_and_text_give_the_same_scores(tmp_path: Path, generator) -> None:
    folder = make_tiny_reward(tmp_path)
    scores = []
    for decode in (None, generator.decode):
        reward = build_reward(folder, decode)
        reward.begin(PROMPT)
        scores.append(reward.score(candidates(generator, ANSWERS)))
    assert scores[0] == pytest.approx(scores[1], abs=TOLERANCE)


@pytest.mark.parametrize("keep", [True, False])
def test_parts_of_texts_give_the_scores_of_the_whole(
    tmp_path: Path, generator, keep: bool, monkeypatch
) -> None:
    """While one part is read a thread tokenises the next; ids need neither text nor time."""
    folder = make_tiny_reward(tmp_path)
    mine = candidates(generator, [f"{text} {i}" for i, text in enumerate(ANSWERS * 3)])
    results = []
    for size in (256, 5, 1):
        monkeypatch.setattr("rewards.model_reward.TEXTS_AT_ONCE", size)
        reward = build_reward(folder, generator.decode, keep=keep)
        reward.begin(PROMPT)
        first, second = reward.score(mine), reward.score(mine)
        assert first == pytest.approx(second, abs=TOLERANCE)
        assert len(reward.last_hidden_states()) == len(mine)
        assert reward.text_sec > 0 and reward.text_wait_sec > 0
        results.append((first, reward.tokens_read))
        reward.reset_counter()
        assert reward.text_sec == reward.text_wait_sec == 0
    assert results[0][0] == pytest.approx(results[1][0], abs=TOLERANCE)
    assert results[0][0] == pytest.approx(results[2][0], abs=TOLERANCE)
    assert len({read for _, read in results}) == 1
    by_ids = build_reward(folder, keep=keep)
    by_ids.begin(PROMPT)
    assert by_ids.score(mine) == pytest.approx(results[0][0], abs=TOLERANCE)
    assert by_ids.text_sec == by_ids.text_wait_sec == 0


def test_a_text_that_fails_in_the_thread_fails_the_call(tmp_path: Path, generator) -> None:
    def decode(answers: Any) -> list[str]:
        return ["\ud800" for _ in answers]

    reward = build_reward(make_tiny_reward(tmp_path), decode)
    reward.begin(PROMPT)
    with pytest.raises(ValueError, match="can't encode"):
        reward.score(candidates(generator, ANSWERS))


@pytest.mark.parametrize("decode", [True, False], ids=["text", "ids"])
def test_control_tokens_as_text_move_no_header(tmp_path: Path, decode: bool) -> None:
    """CASES 4: a prompt and an answer that spell the header; ArmoRM gates at the real one."""
    folder = make_armo(tmp_path)
    typed = "x<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\ny"
    chat = generator_chat(folder, "armo's own tokenizer")
    reward = build_reward(folder, chat.decode if decode else None)
    header = chat.tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|start_header_id|>"])
    for prompt, answer in ((typed, "fine"), ("fine", typed), (typed, typed)):
        reward.begin(prompt)
        ids = chat._encode(answer, split=True)
        got = reward.score([candidate(0, ids)])
        (whole,) = reward.chat.conversation_ids(prompt, [answer])
        pairs = [whole[i : i + 2] for i in range(len(whole))]
        assert pairs.count(header) == 1, "one header, the template's"
        assert got == pytest.approx([armo_score(folder, whole)], abs=TOLERANCE)


def test_the_gating_is_of_the_prompt_alone(tmp_path: Path, generator) -> None:
    reward = build_reward(make_armo(tmp_path), generator.decode)
    gates = []
    for prompt in (PROMPT, "Another question?", PROMPT):
        reward.begin(prompt)
        reward.score(candidates(generator, ANSWERS))
        gates.append(reward.head.gating.clone())
    assert torch.equal(gates[0], gates[2]) and not torch.allclose(gates[0], gates[1])


def test_a_record_names_the_answers_that_were_not_read_whole(
    tiny_models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their scores are of another text than the one beside them."""
    (tmp_path / "tiny-llama").symlink_to(tiny_models / "tiny-llama")
    short = make_tiny_reward(tmp_path / "short-reward", max_position_embeddings=96)
    made = run_search(tmp_path, reward=short.name, batch_size=6, max_gen_tokens=90)
    lengths = {t["candidate"]: t["num_tokens"] for t in made["trajectories"]}
    assert made["reward_truncated"] and set(made["reward_truncated"]) <= set(lengths)
    assert min(lengths[c] for c in made["reward_truncated"]) > 40
    assert "longer than the reward model reads" in caplog.text
    whole = run_search(tiny_models, batch_size=6, max_gen_tokens=90)
    assert "reward_truncated" not in whole


@pytest.mark.parametrize("decode", [True, False], ids=["text", "ids"])
def test_an_over_long_answer_is_cut_and_its_end_kept(tmp_path: Path, decode: bool) -> None:
    """CASES 4: never the header, never what closes the turn."""
    folder = make_tiny_reward(tmp_path, max_position_embeddings=96)
    chat = generator_chat(folder, "x")
    reward = build_reward(folder, chat.decode if decode else None)
    reward.begin("short")
    text = "abcdefg " * 20
    got = reward.score(candidates(chat, ["ok", "no", text]))
    assert reward.truncated == {2}
    (whole,) = reward.chat.conversation_ids("short", [text])
    after = reward.chat.after_ids
    cut = whole[: 96 - len(after)] + after
    expected = classifier_scores(folder, [cut], "right")[0]
    assert got[2] == pytest.approx(expected, abs=TOLERANCE)
    grown = reward.score(candidates(chat, ["ok", "no", text + "more"]))
    assert grown[2] == pytest.approx(expected, abs=TOLERANCE)


def test_a_prompt_too_long_for_the_reward_model_is_named(tmp_path: Path) -> None:
    folder = make_tiny_reward(tmp_path, max_position_embeddings=64)
    reward = build_reward(folder)
    with pytest.raises(ValueError, match=r"reads at most 64"):
        reward.begin("long " * 30)
    reward.begin("short")


def test_a_nan_in_the_weights_is_a_score_that_is_no_number(tmp_path: Path, generator) -> None:
    """CASES 6: of the row that has it, and of no other; infinite is no number either."""
    folder = make_tiny_reward(tmp_path)
    poison = generator.tokenizer("~")["input_ids"][0]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    reward = build_reward(folder, keep=True)
    reward.begin(PROMPT)
    got = reward.score(candidates(generator, ["fine", "bad ~", "fine too", ""]))
    clean = build_reward(make_tiny_reward(tmp_path / "clean"))
    clean.begin(PROMPT)
    expected = clean.score(candidates(generator, ["fine", "bad", "fine too", ""]))
    assert math.isnan(got[1])
    assert [got[i] for i in (0, 2, 3)] == pytest.approx([expected[i] for i in (0, 2, 3)], abs=1e-4)
    clean.head.weight[0, 0] = math.inf
    assert all(map(math.isnan, clean.score(candidates(generator, ["fine", "other"]))))


# ---- self-reward -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
def test_self_reward_is_minus_the_perplexity_by_transformers(tmp_path, keep: bool) -> None:
    folder = make_tiny_llama(tmp_path)
    chat, hf = generator_chat(folder, "x"), reference(folder)
    reward = SelfReward(new_reader(load(folder), keep=keep), chat.prompt_ids)
    reward.begin(PROMPT)
    texts = dict(enumerate(ANSWERS))
    for round_ in range(3):
        live = candidates(chat, list(texts.values()))
        for got, c in zip(reward.score(live), live, strict=True):
            ids = torch.tensor([[*chat.prompt_ids(PROMPT), *c.answer.tolist()]])
            with torch.inference_mode():
                loss = hf(ids, labels=ids).loss.item()
            assert got == pytest.approx(-math.exp(loss), rel=1e-4)
        texts = {i: t + " more"[: round_ + 2] for i, t in texts.items()}
        texts = {i: t for i, t in texts.items() if i % 2 == 0}
        texts = dict(enumerate(ANSWERS)) if len(texts) == 1 else texts
        reward.keep_only([])
    assert reward.kv_bytes == 0
    assert reward.fixed_tokens() == (len(chat.prompt_ids(PROMPT)), 0)
    reward.reset_counter()
    assert reward.tokens_read == 0


def test_self_reward_keeps_the_sums_of_what_it_has_read(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    chat = generator_chat(folder, "x")
    reward = SelfReward(new_reader(load(folder)), chat.prompt_ids)
    fresh = SelfReward(new_reader(load(folder), keep=False), chat.prompt_ids)
    for each in (reward, fresh):
        each.begin(PROMPT)
    texts = {0: [5, 6, 7], 1: [8, 9], 2: []}
    for step in range(4):
        live = [candidate(i, ids) for i, ids in texts.items()]
        before = reward.tokens_read
        assert reward.score(live) == pytest.approx(fresh.score(live), rel=1e-5)
        assert reward.tokens_read - before == (5 if step == 0 else 2 * len(texts) - 2)
        reward.fork([1], [10 + step])
        fresh.fork([1], [10 + step])
        texts[10 + step] = list(texts[1])
        texts = {i: ids + [20 + i, 30 + step] if i != 2 else ids for i, ids in texts.items()}
    assert reward.kv_bytes > 0 and fresh.kv_bytes == 0


def test_nothing_to_score_reads_nothing(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    chat = generator_chat(folder, "x")
    own = SelfReward(new_reader(load(folder)), chat.prompt_ids)
    model = build_reward(make_tiny_reward(tmp_path / "reward"))
    for reward in (own, model):
        reward.begin(PROMPT)
        before = reward.tokens_read
        assert reward.score([]) == [] and reward.tokens_read == before
