"""Post-processing that reads with a model, against transformers; and main.py's own files through
all.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from postprocess import (
    check,
    concat_json,
    eval_ppl,
    gather_best_ans,
    merge_json,
    plot_compare,
    plot_memory,
    plot_partial,
    plot_scores,
    win_rate,
)
from postprocess.command import PROJECT, Refused
from postprocess.reward_judge import score_answers
from tests.postprocess_archive import make_object, write_run

ANSWERS = {1: "Blue, as the sky is.", 2: "4"}


def ppl_archive(folder: Path, tiny_models: Path) -> Path:
    fields = {
        "llm_name": "tiny-llama",
        "reward_model_name": "tiny-reward",
        "model_dir": str(tiny_models),
        "prompt_template": "auto",
    }
    prompts = {}
    for idx, text in ANSWERS.items():
        item = make_object(idx, [0.0, 1.0], 1, **fields)
        item["trajectories"][1]["output"] = text
        prompts[idx] = [item]
    write_run(folder, "x", prompts)
    return folder


def perplexities(models: Path, prompt: str, answer: str) -> tuple[float, float]:
    """exp(mean NLL) of prompt and answer, and of the answer alone, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(models / "tiny-llama")
    model = AutoModelForCausalLM.from_pretrained(models / "tiny-llama", dtype=torch.float32).eval()
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([before + tokenizer(answer, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double()
    each = -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return math.exp(each.mean()), math.exp(each[len(before) - 1 :].mean())


def test_perplexity_equals_transformers(tmp_path: Path, tiny_models: Path) -> None:
    archive = ppl_archive(tmp_path / "a", tiny_models)
    assert eval_ppl.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    with (tmp_path / "o" / "perplexity_tiny-llama_tiny-reward.csv").open() as file:
        (row,) = csv.DictReader(file)
    prompts = {1: "Name a colour.", 2: "Add 2 and 2."}
    expected = [perplexities(tiny_models, prompts[idx], text) for idx, text in ANSWERS.items()]
    whole, alone = zip(*expected, strict=True)
    assert float(row["perplexity"]) == pytest.approx(sum(whole) / 2, rel=1e-4)
    assert float(row["answer"]) == pytest.approx(sum(alone) / 2, rel=1e-4)
    assert float(row["answer_geometric"]) == pytest.approx(math.sqrt(alone[0] * alone[1]), rel=1e-4)
    assert (row["prompts"], row["tokens"]) == ("2", str(sum(map(len, ANSWERS.values()))))


def test_perplexity_leaves_out_by_name(
    tmp_path: Path, tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty best answer has no perplexity; one beyond the model's positions can't be read."""
    archive = ppl_archive(tmp_path / "a", tiny_models)
    write_run(archive, "y", {1: json.loads(next(archive.rglob("*0001.json")).read_text())})
    for path, text in zip(sorted((archive / "x").iterdir()), ("", "x" * 5000), strict=True):
        objects = json.loads(path.read_text())
        objects[0]["trajectories"][1]["output"] = text
        path.write_text(json.dumps(objects))
    assert eval_ppl.main([str(archive), "--out", str(tmp_path / "o")]) == 1
    assert "prompt 1 left out, the answer is empty" in caplog.text
    assert "prompt 2 left out, 5000 tokens, there is room for" in caplog.text
    with (tmp_path / "o" / "perplexity_tiny-llama_tiny-reward.csv").open() as file:
        (row,) = csv.DictReader(file)  # run y is not touched by run x
    assert (row["prompts"], row["tokens"]) == ("1", str(len(ANSWERS[1])))


def test_perplexity_without_the_model(tmp_path: Path, tiny_models: Path, capsys) -> None:
    archive = ppl_archive(tmp_path / "a", tiny_models)
    flags = [str(archive), "--out", str(tmp_path / "o"), "--llm_name", "no-such-model"]
    assert eval_ppl.main(flags) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_reward_judge_equals_transformers(tiny_models: Path) -> None:
    """The same conversation, closed by the template, through the checkpoint's own head."""
    rows = [
        {"instruction": "Name a colour.", "output": "Blue."},
        {"instruction": "Name a colour.", "output": "Red, or green."},
        {"instruction": "Add 2 and 2.", "output": "4"},
        {"instruction": "Add 2 and 2.", "output": "Blue."},
        {"instruction": "Add 2 and 2.", "output": "4"},
    ]
    scores = score_answers(rows, "tiny-reward", str(tiny_models))
    assert len(scores) == 4
    folder = tiny_models / "tiny-reward"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for (instruction, output), score in scores.items():
        turns = [
            {"role": "user", "content": instruction},
            {"role": "assistant", "content": output},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            expected = model(ids, attention_mask=torch.ones_like(ids)).logits[0, 0].item()
        assert score == pytest.approx(expected, abs=1e-4)


def test_reward_judge_by_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`module:function`, as for main.py: the number of words."""
    (tmp_path / "words_reward.py").write_text(
        "def score(prompt, answers):\n    return [float(len(a.split())) for a in answers]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"instruction": "x", "output": "a b c"}, {"instruction": "x", "output": "a"}]
    scores = score_answers(rows, "words_reward:score", None)
    assert scores == {("x", "a b c"): 3.0, ("x", "a"): 1.0}


def test_reward_judge_without_a_model() -> None:
    with pytest.raises(Refused, match="no-such-model"):
        score_answers([{"instruction": "x", "output": "y"}], "no-such-model", None)


def run_main(tiny_models: Path, folder: Path, *flags: str) -> None:
    prompts = folder / "prompts.json"
    prompts.write_text(
        json.dumps([{"JSON_idx": i, "prompt": f"Say {i} words."} for i in (1, 2, 5)])
    )
    command = [sys.executable, "main.py", "--data_filename", str(prompts)]
    command += ["--model_dir", str(tiny_models), "--llm_name", "tiny-llama"]
    command += ["--reward_model_name", "tiny-reward", "--max_tokens", "450"]
    command += ["--max_gen_tokens", "400", "--ignore_stop", *flags]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_our_own_runs_go_through_everything(
    tmp_path: Path, tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two seeds of Best-of-4 and a Speculative Rejection of main.py, from check to win rate."""
    archive, imgs = tmp_path / "archive", tmp_path / "imgs"
    archive.mkdir()
    for seed in ("0", "1"):
        run_main(
            tiny_models, tmp_path, "--batch_size", "4", "--seed", seed, *out(archive, f"b{seed}")
        )
    speculative = ["--speculative_rejection", "--alpha", "0.5", "--kv_cache_gb", "0.004"]
    run_main(tiny_models, tmp_path, *speculative, *out(archive, "s"))
    assert concat_json.main([str(archive)]) == 0
    assert (archive / "Bo8_tiny-llama_tiny-reward_0").is_dir()
    assert check.main([str(archive)]) == 0, capsys.readouterr().out
    for script in (plot_compare, plot_memory, plot_partial, plot_scores):
        assert script.main([str(archive), "--out", str(imgs)]) == 0
    with (imgs / "tiny-llama_tiny-reward.csv").open() as file:
        table = {row["method"]: row for row in csv.DictReader(file)}
    assert list(table) == ["Bo4", "Bo8", "SpR_alpha_0.5"]
    assert table["Bo8"]["score"] == "100.0"
    # --ignore_stop: 4 candidates x 400 tokens x 3 prompts, on each of the merged run's two "GPUs".
    assert float(table["Bo8"]["tokens_generated"]) == 2 * 4 * 400 * 3
    assert float(table["Bo4"]["relative_tokens"]) == pytest.approx(0.5, rel=0.01)
    assert {row["prompts"] for row in table.values()} == {"3"}
    results, rates = tmp_path / "results", tmp_path / "win_rate"
    assert gather_best_ans.main([str(archive), "--out", str(results)]) == 0
    assert merge_json.main([str(results), "--out", str(rates)]) == 0
    reference = json.loads((rates / "tiny-llama_tiny-reward_ref.json").read_text())
    assert [row["instruction"] for row in reference] == [f"Say {i} words." for i in (1, 2, 5)]
    flags = ["--out", str(rates), "--imgs", str(imgs), "--metric", "raw"]
    assert win_rate.main([*flags, "--judge", "scores"]) == 0
    reward = ["--judge", "reward", "--reward_model_name", "tiny-reward", "--model_dir"]
    assert win_rate.main([*flags, *reward, str(tiny_models)]) == 0
    # The tiny generator writes bytes that are no text; encoded again they may not fit: code 1.
    assert eval_ppl.main([str(archive), "--out", str(results)]) in (0, 1)
    assert "not a GPT-4 win rate" in capsys.readouterr().out


def out(archive: Path, name: str) -> list[str]:
    return ["--output_folder", str(archive / name)]
