"""Both methods where something is wrong: scores, memory, prompts, foreign tokenizers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.decoder import Decoder
from generator import PromptFailed
from tests.method_runs import (
    FUNCTION,
    PAGE,
    Made,
    check_conservation,
    run_search,
    scores,
    texts,
)
from tests.search import PROMPT
from tests.test_engine_decoder import SmallMemory


@pytest.fixture(scope="module")
def best_of_16(tiny_models: Path) -> Made:
    return run_search(tiny_models, batch_size=16)


@pytest.mark.parametrize("changes", [{"batch_size": 24}, {"init_batch_size": 24, "kv_pages": 48}])
def test_candidates_without_a_score_are_recorded_and_can_not_win(tiny_models, changes) -> None:
    """CASES 6."""
    made = run_search(tiny_models, reward="tests.harness:nan_reward", **changes)
    check_conservation(made, 24)
    assert made["trajectories"] and all(math.isfinite(s) for s in scores(made).values())
    if "batch_size" in changes:
        assert all("nan" in f["reason"] for f in made["failed_rows"]) and made["failed_rows"]
    assert any(None in r["scores"] for r in made["rounds"])


@pytest.mark.parametrize("changes", [{"batch_size": 4}, {"init_batch_size": 4}])
def test_a_prompt_where_nothing_has_a_score_fails_with_its_reason(tiny_models, changes) -> None:
    """CASES 6: all NaN is a failed prompt."""
    with pytest.raises(PromptFailed, match="no candidate has a score: its score is nan"):
        run_search(tiny_models, reward="tests.harness:nan_reward", prompt="nothing", **changes)


def test_a_broken_reward_fails_the_prompt(tiny_models) -> None:
    with pytest.raises(PromptFailed, match="returned 0 scores for 4 answers"):
        run_search(tiny_models, reward="tests.harness:empty_reward", batch_size=4)


@pytest.mark.parametrize("changes", [{"batch_size": 40}, {"init_batch_size": 40, "kv_pages": 80}])
def test_out_of_memory_gives_the_same_result(tiny_models, monkeypatch, changes) -> None:
    """CASES 14: in prefill, decoding and scoring; the same N, and the JSON says so."""
    changes = {**changes, "prompt": "long " * 60, "max_tokens": 512}
    expected = run_search(tiny_models, **changes)
    assert expected["out_of_memory_splits"] == 0
    monkeypatch.setattr("suite.assembly.make_ops", lambda device, dtype: SmallMemory(16, 260))
    made = run_search(tiny_models, **changes)
    assert made["out_of_memory_splits"] >= 3
    for name in ("rejected", "failed_rows"):
        assert [(r["candidate"], r.get("length")) for r in made[name]] == [
            (r["candidate"], r.get("length")) for r in expected[name]
        ]
    assert texts(made) == texts(expected)
    assert scores(made) == pytest.approx(scores(expected), abs=1e-4)


@pytest.mark.parametrize("changes", [{"batch_size": 24}, {"init_batch_size": 24, "kv_pages": 48}])
def test_rows_of_nan_are_named_and_the_others_finish(tiny_models, monkeypatch, changes) -> None:
    """CASES 10."""
    clean = texts(run_search(tiny_models, batch_size=24))
    poison = clean[5][3]
    inner = Decoder.start

    def start(self: Decoder, *args: Any) -> None:
        self.model.embed[poison] = math.nan
        inner(self, *args)

    monkeypatch.setattr(Decoder, "start", torch.inference_mode()(start))
    made = run_search(tiny_models, **changes, reward=FUNCTION)
    check_conservation(made, 24)
    bad = {i for i, ids in clean.items() if poison in ids[:-1]}
    failed = {f["candidate"] for f in made["failed_rows"]}
    assert failed and failed <= bad
    assert all("finite" in f["reason"] for f in made["failed_rows"])
    if "batch_size" in changes:
        assert failed == bad
    assert all(texts(made)[i] == clean[i] for i in texts(made))


def test_a_prompt_without_a_token_is_skipped(tiny_models, monkeypatch) -> None:
    monkeypatch.setattr("suite.chat.Chat.prompt_ids", lambda chat, prompt: [])
    made = run_search(tiny_models, batch_size=4)
    assert made["trajectories"] == [] and "no tokens" in made["skipped"]


def test_a_prompt_over_the_bound_is_skipped(tiny_models) -> None:
    """CASES 16."""
    made = run_search(tiny_models, batch_size=2, prompt="long " * 80)
    assert made["trajectories"] == [] and "raise --max_tokens" in made["skipped"]
    fits = run_search(tiny_models, batch_size=2, max_tokens=len(PROMPT) + 60)
    room = len(PROMPT) + 60 - fits["num_prompt_tokens"]
    assert max(t["num_tokens"] for t in fits["trajectories"]) <= room


def test_a_text_that_no_tokenizer_takes_fails_the_prompt(tiny_models) -> None:
    with pytest.raises(PromptFailed, match="can't encode"):
        run_search(tiny_models, batch_size=2, prompt="half \ud83d a pair")


@pytest.mark.parametrize(
    "prompt", ["x", "🚀🚀 שלום", "<|im_end|>\n<|im_start|>assistant\n", "a\nb"]
)
def test_odd_prompts_run(tiny_models, prompt: str) -> None:
    made = run_search(tiny_models, batch_size=3, prompt=prompt)
    check_conservation(made, 3)
    assert all(t["prompt"] == prompt for t in made["trajectories"])


def test_another_architecture_and_dtype_run(tiny_models, tmp_path: Path) -> None:
    from tests.tiny import make_tiny_llama

    make_tiny_llama(tmp_path / "qwen", arch="qwen3")
    made = run_search(
        tmp_path, llm_name="qwen", reward=FUNCTION, dtype="bfloat16", init_batch_size=16
    )
    check_conservation(made, 16)
    assert np.isfinite(list(scores(made).values())).all()


@pytest.mark.parametrize("changes", [{"batch_size": 2}, {"init_batch_size": 2}], ids=str)
def test_one_row_that_can_not_fit_says_what_is_missing(tiny_models, changes) -> None:
    """CASES 15: seven pages of 32 tokens at 256 bytes each: 57,344 bytes, said in three digits."""
    words = r"one row of 200 answer tokens, (\S+) GB with this model, got 5\.6e-05; raise it"
    with pytest.raises(ValueError, match=words) as refused:
        run_search(tiny_models, kv_cache_gb=56_000e-9, reward=FUNCTION, **changes)
    enough = float(re.search(words, str(refused.value))[1])
    assert enough == 57_400e-9
    assert run_search(tiny_models, kv_cache_gb=enough, reward=FUNCTION, **changes)


def test_a_budget_that_the_reward_models_cache_makes_too_small_is_named(tiny_models) -> None:
    """Seen only beside both models: enough for a row, not for a row and what is kept of it."""
    with pytest.raises(ValueError, match=r"^--kv_cache_gb 6e-05 is too small: .*0\.000060000 GB"):
        run_search(tiny_models, kv_cache_gb=60_000e-9, reward_cache="on")
    assert run_search(tiny_models, kv_cache_gb=60_000e-9, reward_cache="off")


def test_the_kv_budget_decides_over_rows_and_waves(tiny_models, best_of_16) -> None:
    """--kv_cache_gb is how a CPU run gets its stops: 40 pages are five rows at full length."""
    gigabytes = 40 * PAGE * 256 / 1e9
    made = run_search(tiny_models, batch_size=12, kv_cache_gb=gigabytes)
    assert made["plan"]["pages"] == 40 and texts(made).items() <= texts(best_of_16).items()
    assert sum(name == "generation: prefill" for name, _ in made["clock"]) == 3
    cut = run_search(tiny_models, kv_cache_gb=gigabytes, reward=FUNCTION)
    assert cut["rounds"][0]["rows"] <= 20 and cut["rejected"]


def test_a_reward_model_with_fewer_ids_reads_text(tiny_models, tmp_path: Path) -> None:
    """A generator's padded vocabulary has ids that the reward model has no row for."""
    from tests.tiny import make_tiny_llama, make_tiny_reward

    make_tiny_llama(tmp_path / "wide", vocab=400)
    make_tiny_reward(tmp_path / "tiny-reward")
    made = run_search(tmp_path, llm_name="wide", batch_size=8)
    check_conservation(made, 8)
    assert max(i for ids in texts(made).values() for i in ids) >= 259


def test_a_reward_with_another_tokenizer_runs_both_methods(tiny_models, tmp_path: Path) -> None:
    """Text in between: merges at a round's end are read again, and the scores are the same."""
    import shutil

    from tests.reward_models import merge_tokens
    from tests.tiny import make_tiny_reward

    shutil.copytree(tiny_models / "tiny-llama", tmp_path / "tiny-llama")
    merge_tokens(make_tiny_reward(tmp_path / "tiny-reward", vocab=300), ["he", "ok", "Ġa", "??"])
    best = run_search(tmp_path, batch_size=32)
    cut = run_search(tmp_path, init_batch_size=32, kv_pages=64, alpha=0.3)
    check_conservation(cut, 32)
    assert cut["rejected"] and texts(cut).items() <= texts(best).items()
    assert scores(cut) == pytest.approx({i: scores(best)[i] for i in scores(cut)}, abs=1e-4)


def test_a_template_with_a_space_before_the_answer_reads_text(tiny_models, tmp_path: Path) -> None:
    """Mistral's and Eurus's: in text, the space and the first word are one token."""
    from suite.chat import load_tokenizer
    from tests.reward_models import classifier_scores, merge_tokens
    from tests.tiny import make_tiny_llama, make_tiny_reward

    for make, name in ((make_tiny_llama, "tiny-llama"), (make_tiny_reward, "tiny-reward")):
        folder = make(tmp_path / name, vocab=500)
        merge_tokens(folder, ["Ġ" + letter for letter in map(chr, range(33, 127))])
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} =>"
        "{% else %}{{ ' ' + m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    made = run_search(tmp_path, batch_size=16)
    texts_ = [t["output"] for t in made["trajectories"]]
    whole = [
        tokenizer(f"{PROMPT} => {text}<|im_end|>", add_special_tokens=False)["input_ids"]
        for text in texts_
    ]
    expected = classifier_scores(folder, whole, "right")
    assert list(scores(made).values()) == pytest.approx(expected, abs=1e-4)
