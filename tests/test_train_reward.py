"""The reward model's recipe on a tiny random model: learning, resume, what is written and read."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from benchmarks import train_reward
from benchmarks.reward_training import backbone, evaluation, package, pairs, samples
from engine.candidates import Candidate
from engine.weights import BadWeights
from rewards.loading import load_reward_model
from rewards.model_reward import ModelReward
from suite.models import resolve
from tests.harness import new_reader
from tests.tiny import ARCHITECTURES, CHAT_TEMPLATE, make_tiny_llama, make_tiny_reward

CPU = torch.device("cpu")
QUICK = [
    *("--rank", "4", "--lr", "1e-2", "--batch_pairs", "16"),
    *("--max_length", "96", "--holdout", "0.1", "--device", "cpu"),
]


def _write_pairs(path: Path, count: int, seed: int) -> Path:
    """The answer with more 'a' is the better one: a pattern that a tiny model can learn."""
    rng = np.random.default_rng(seed)
    with gzip.open(path, "wt") as file:
        for index in range(count):
            good = "".join(rng.choice(list("aaab"), rng.integers(8, 24)))
            bad = "".join(rng.choice(list("abbb"), rng.integers(8, 24)))
            record = {
                "prompt": f"question {seed} {index // 2}",
                "chosen": good,
                "rejected": bad,
                "source": f"source{index % 2}",
                "kind": "human",
                "gid": index // 2,
            }
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    make_tiny_llama(folder / "model", initializer_range=0.1)
    _write_pairs(folder / "train.jsonl.gz", 160, 0)
    _write_pairs(folder / "valid.jsonl.gz", 60, 1)
    return folder


def _run(world: Path, out: str, *more: str) -> dict:
    files = ["--train", world / "train.jsonl.gz", "--valid", world / "valid.jsonl.gz"]
    argv = [*files, "--model", world / "model", "--out", world / out, *QUICK, *more]
    return train_reward.main([str(a) for a in argv])


@pytest.fixture(scope="module")
def trained(world: Path) -> dict:
    return _run(world, "whole", "--epochs", "4")


def test_learns_and_reports(trained: dict, world: Path) -> None:
    told = trained["training"]["history"]
    assert told[0]["held_out_loss"] == pytest.approx(math.log(2), abs=1e-6)  # the head starts at 0
    overall = trained["valid"]["overall"]
    assert overall["pairs"] == 60 and overall["accuracy"] > 0.9
    assert overall["low"] < overall["accuracy"] < overall["high"]
    assert sum(s["pairs"] for s in trained["valid"]["source"].values()) == 60
    assert json.loads((world / "whole" / "metrics.json").read_text())["valid"] == trained["valid"]


def test_resumed_run_equals_uninterrupted(trained: dict, world: Path) -> None:
    _run(world, "parts", "--epochs", "4", "--stop_step", "5", "--checkpoint_steps", "3")
    assert json.loads((world / "parts/checkpoint/state.json").read_text())["step"] == 5
    again = _run(world, "parts", "--epochs", "4", "--stop_step", "17")
    assert again["training"]["steps"] == 17
    last = _run(world, "parts", "--epochs", "4")
    assert last["training"]["steps"] == trained["training"]["steps"]
    whole = load_file(world / "whole" / package.WEIGHTS)
    parts = load_file(world / "parts" / package.WEIGHTS)
    assert whole.keys() == parts.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name


def test_checkpoint_of_another_recipe_is_refused(trained: dict, world: Path) -> None:
    with pytest.raises(ValueError, match=r"rank: 4 -> 8"):
        _run(world, "whole", "--epochs", "4", "--rank", "8")


def test_package_holds_peft_names_and_a_float32_head(trained: dict, world: Path) -> None:
    tensors = load_file(world / "whole" / package.WEIGHTS)
    config = json.loads((world / "whole" / package.CONFIG).read_text())
    assert len(tensors) == 2 * 7 * 2 + 1
    name = "base_model.model.model.layers.1.mlp.down_proj"
    assert tensors[f"{name}.lora_A.weight"].shape == (4, 48)
    assert tensors[f"{name}.lora_B.weight"].shape == (32, 4)
    assert tensors["score.weight"].shape == (1, 32)
    assert tensors["score.weight"].dtype == torch.float32
    assert config["lora"]["scaling"] == config["lora"]["alpha"] / 4
    assert config["scoring"]["score_token"] == "<|im_end|>"
    assert config["pad_token_id"] != config["scoring"]["score_token_id"]


def test_score_equals_transformers_classifier_with_merged_weights(
    trained: dict, world: Path
) -> None:
    """Merging by hand into `AutoModelForSequenceClassification`, pooled by its own rule."""
    out = world / "whole"
    model, facts, config = package.load_package(out, world / "model", CPU)
    loaded = _pairs_of(world)[:6]
    rows = pairs.sequences(loaded, facts)
    ours = backbone.score_rows(model, rows, facts.pad_id, 4096)

    merged = AutoModelForSequenceClassification.from_pretrained(
        world / "model", num_labels=1, pad_token_id=config["pad_token_id"]
    ).eval()
    tensors = load_file(out / package.WEIGHTS)
    weights = dict(merged.named_parameters())
    with torch.no_grad():
        merged.score.weight.copy_(tensors["score.weight"])
        for name in [n for n in tensors if n.endswith("lora_A.weight")]:
            down, up = tensors[name].float(), tensors[name.replace("lora_A", "lora_B")].float()
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[target] += config["lora"]["scaling"] * up @ down
        ids, _ = backbone.collate(rows, facts.pad_id, CPU)
        theirs = merged(ids, attention_mask=(ids != facts.pad_id).long()).logits[:, 0]
    assert np.std(ours) > 0.1
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


def test_peft_loads_the_folder_itself(trained: dict, world: Path) -> None:
    out = world / "whole"
    model, facts, config = package.load_package(out, world / "model", CPU)
    rows = pairs.sequences(_pairs_of(world)[:4], facts)
    base = AutoModelForSequenceClassification.from_pretrained(
        world / "model", num_labels=1, pad_token_id=config["pad_token_id"]
    )
    base.score.load_state_dict({"weight": load_file(out / package.WEIGHTS)["score.weight"]})
    theirs = PeftModel.from_pretrained(base, str(out)).eval()
    ids, _ = backbone.collate(rows, facts.pad_id, CPU)
    with torch.no_grad():
        logits = theirs(input_ids=ids, attention_mask=(ids != facts.pad_id).long()).logits[:, 0]
    ours = backbone.score_rows(model, rows, facts.pad_id, 4096)
    np.testing.assert_allclose(ours, logits.numpy(), atol=1e-4)


def test_scores_do_not_depend_on_batching(trained: dict, world: Path) -> None:
    model, facts, _ = package.load_package(world / "whole", world / "model", CPU)
    rows = pairs.sequences(_pairs_of(world)[:10], facts)
    together = backbone.score_rows(model, rows, facts.pad_id, 100_000)
    alone = np.asarray([backbone.score_rows(model, [r], facts.pad_id, 1)[0] for r in rows])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_missing_tensor_is_an_error(trained: dict, world: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(world / "whole" / package.WEIGHTS)
    tensors["other.weight"] = tensors.pop("score.weight")
    save_file(tensors, tmp_path / package.WEIGHTS)
    (tmp_path / package.CONFIG).write_text((world / "whole" / package.CONFIG).read_text())
    with pytest.raises(ValueError, match="other.weight"):
        package.load_package(tmp_path, world / "model", CPU)


# ---- what is trained is what the suite scores ---------------------------------------------------

PROMPT, ANSWERS = "Why?", ["aab", "", "ab ab.", " b \n"]
# Only a finished answer has thoughts before it, as in Qwen3's template.
THINKS = CHAT_TEMPLATE.replace(
    "message['content']",
    "('<think></think>' if message['role'] == 'assistant' else '') + message['content'] | trim",
)


def _engine_scores(folder: Path, decode: bool) -> list[float]:
    """Through the suite: by the answers' ids, or by their text as for another vocabulary."""
    made = load_reward_model(resolve(str(folder), role="reward"), torch.float32, CPU)
    tokenizer = made.chat.tokenizer
    reward = ModelReward(
        new_reader(made.backbone), made.head, made.chat, made.chat.decode if decode else None
    )
    reward.begin(PROMPT)
    ids = pairs.encode_texts(ANSWERS, tokenizer)
    return reward.score([Candidate(i, row) for i, row in enumerate(ids)])


def _trained_scores(model: backbone.RewardModel, base: Path) -> np.ndarray:
    tokenizer, facts = backbone.load_tokenizer(base)
    prompt = pairs.encode_prompt([{"role": "user", "content": PROMPT}], tokenizer, 1000)
    end = np.asarray([facts.turn_end_id], dtype=np.int32)
    rows = [np.concatenate((prompt, a, end)) for a in pairs.encode_texts(ANSWERS, tokenizer)]
    return backbone.score_rows(model, rows, facts.pad_id, 4096)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, THINKS], ids=["plain turns", "thoughts"])
@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_suite_scores_as_trained(
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    rank: int,
    template: str,
) -> None:
    base = make_tiny_llama(tmp_path / "base", arch, initializer_range=0.1)
    (base / "chat_template.jinja").write_text(template)
    kept: list[backbone.RewardModel] = []
    train = train_reward.train
    monkeypatch.setattr(
        train_reward, "train", lambda *a: (out := train(*a), kept.append(out[0]))[0]
    )
    argv = ["--train", world / "train.jsonl.gz", "--model", base, "--out", tmp_path / "out"]
    argv += [*QUICK, "--epochs", "1", "--rank", rank, "--max_length", "160"]
    train_reward.main([str(a) for a in argv])
    model = kept[0]
    if rank:  # stored as float16
        model, _, _ = package.load_package(tmp_path / "out", base, CPU)
    expected = _trained_scores(model, base)
    assert np.std(expected) > 1e-2
    for decode in (False, True):
        np.testing.assert_allclose(_engine_scores(tmp_path / "out", decode), expected, atol=1e-4)


def test_other_classifiers_keep_what_their_template_writes_behind_the_answer(
    tmp_path: Path,
) -> None:
    folder = make_tiny_reward(tmp_path / "theirs")
    made = load_reward_model(resolve(str(folder), role="reward"), torch.float32, CPU)
    assert made.chat.decode([made.chat.after_ids]) == ["\n"]
    assert len(made.chat.after_ids) == 2  # the turn's end and the line break


def test_a_whole_model_with_another_tokenizer_is_refused(world: Path, tmp_path: Path) -> None:
    _run(world, "swapped", "--rank", "0", "--epochs", "1", "--stop_step", "1")
    path = world / "swapped" / package.CONFIG
    config = json.loads(path.read_text())
    config["scoring"]["score_token_id"] = 5
    path.write_text(json.dumps(config))
    with pytest.raises(BadWeights, match="take the tokenizer that it was trained with"):
        _engine_scores(world / "swapped", False)
    del config["scoring"]
    path.write_text(json.dumps(config))
    with pytest.raises(BadWeights, match=r"names no scoring\.score_token"):
        _engine_scores(world / "swapped", False)


def test_a_base_without_a_chat_template_is_refused_before_training(
    world: Path, tmp_path: Path
) -> None:
    base = make_tiny_llama(tmp_path / "base", chat_template=False)
    with pytest.raises(ValueError, match="no chat template.*add chat_template to"):
        _run(world, "untemplated", "--model", str(base))
    assert not (world / "untemplated").exists()


def test_every_weight_can_be_trained(world: Path) -> None:
    _run(world, "full", "--rank", "0", "--epochs", "1", "--lr", "1e-3")
    model = AutoModelForSequenceClassification.from_pretrained(world / "full")
    before = AutoModelForSequenceClassification.from_pretrained(world / "model", num_labels=1)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = model.get_parameter(name) - before.get_parameter(name)
    assert moved.abs().max() > 1e-4
    assert model.score.weight.abs().max() > 1e-4


def test_tokens_file_keeps_pairs_and_refuses_another_tokenizer(world: Path, tmp_path: Path) -> None:
    _, facts = backbone.load_tokenizer(world / "model")
    loaded = _pairs_of(world)
    pairs.save_pairs(loaded, facts, tmp_path / "t.safetensors")
    again, theirs = pairs.load_pairs(tmp_path / "t.safetensors")
    assert theirs == facts and len(again) == len(loaded)
    for one, other in zip(loaded, again, strict=True):
        assert one.group == other.group and one.source == other.source
        assert np.array_equal(one.prompt, other.prompt)
        assert np.array_equal(one.rejected, other.rejected)
    changed = pairs.Facts(facts.turn_end, facts.turn_end_id + 1, facts.pad_id, facts.template)
    with pytest.raises(ValueError, match="was made for"):
        train_reward.load_set(tmp_path / "t.safetensors", None, changed, 96)


def test_sequence_is_the_template_up_to_the_turn_end(world: Path) -> None:
    tokenizer, facts = backbone.load_tokenizer(world / "model")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    record = {"prompt": "hi", "chosen": "yo", "rejected": "no"}
    (pair,), skipped = pairs.encode_records([record], tokenizer, 96)
    assert skipped == 0
    assert tokenizer.decode(pairs.sequences([pair], facts)[0]) == whole.removesuffix("\n")


def test_long_history_loses_its_oldest_exchange(world: Path) -> None:
    tokenizer, _ = backbone.load_tokenizer(world / "model")
    turns = [
        {"role": "user", "content": "x" * 40},
        {"role": "assistant", "content": "y" * 40},
        {"role": "user", "content": "z" * 40},
    ]
    text = tokenizer.decode(pairs.encode_prompt(turns, tokenizer, 110))
    assert "z" * 40 in text and "x" not in text and text.endswith("assistant\n")


def test_split_keeps_prompts_together_and_batches_cover_every_pair(world: Path) -> None:
    _, facts = backbone.load_tokenizer(world / "model")
    loaded = _pairs_of(world)
    kept, held = pairs.split_by_group(loaded, 0.2, seed=3)
    assert not {p.group for p in kept} & {p.group for p in held}
    assert len(kept) + len(held) == len(loaded) and 10 <= len(held) <= 14
    batches = pairs.epoch_batches(loaded, 16, seed=3, epoch=0)
    assert sorted(np.concatenate(batches)) == list(range(len(loaded)))
    other = pairs.epoch_batches(loaded, 16, seed=3, epoch=1)
    assert any(not np.array_equal(a, b) for a, b in zip(batches, other, strict=True))


def test_cut_shortens_both_answers_to_one_count() -> None:
    ids = np.arange(100, dtype=np.int32)
    pair = pairs.Pair(ids[:4], ids[:60], ids[10:30], "g", "s", "k", 60, 20)
    counts = set()
    for epoch in range(50):
        (cut,) = pairs.cut_pairs([pair], 1.0, 0, epoch)
        count = len(cut.chosen)
        counts.add(count)
        assert 8 <= count <= 60 and len(cut.rejected) == min(count, 20)
        assert np.array_equal(cut.chosen, pair.chosen[:count])
    assert len(counts) > 15
    assert pairs.cut_pairs([pair], 0.0, 0, 0) == [pair]


@pytest.mark.parametrize("unit", [1, 2])
def test_micro_batches_keep_the_bound(unit: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 40)
    seen = []
    for rows in pairs.micro_batches(lengths, 120, unit):
        assert len(rows) * lengths[rows].max() <= 120
        assert all(rows[i] + 1 == rows[i + 1] for i in range(0, len(rows), 2)) or unit == 1
        seen += rows.tolist()
    assert sorted(seen) == list(range(40))


def test_wilson_and_rank_correlation_by_hand() -> None:
    low, high = evaluation.wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert evaluation.rank_correlation(np.array([1, 2, 3]), np.array([10, 30, 20])) == 0.5
    ties = evaluation.ranks(np.array([5.0, 1.0, 5.0]))
    assert ties.tolist() == [1.5, 0.0, 1.5]
    assert math.isnan(evaluation.rank_correlation(np.array([1, 1]), np.array([1, 2])))


def test_report_counts_length_bias_by_hand() -> None:
    ids = np.zeros(1, dtype=np.int32)
    made = [
        pairs.Pair(ids, ids, ids, str(i), "s", "ai", c, r)
        for i, (c, r) in enumerate([(9, 5), (9, 5), (5, 9), (7, 7)])
    ]
    found = evaluation.report(np.array([[-1.0, -2], [0, 1], [2, 3], [1, 1]]), made)
    assert found["overall"]["accuracy"] == (1 + 0 + 0 + 0.5) / 4
    assert found["chosen is longer"]["accuracy"] == 0.5
    assert found["chosen is shorter"]["accuracy"] == 0.0
    assert found["share where the longer answer scores higher"] == pytest.approx(2 / 3)
    assert found["lead over length"]["mean"] == (1.5 - 2.5) / 4


def test_samples_and_scores_of_unfinished_answers(trained: dict, world: Path) -> None:
    model, facts, _ = package.load_package(world / "whole", world / "model", CPU)
    prompts = [pair.prompt for pair in _pairs_of(world)[:3]]
    answers = samples.draw_samples(world / "model", facts, prompts, 10, 24, CPU)
    samples.save_samples(world / "s.safetensors", prompts, answers)
    prompts, answers = samples.load_samples(world / "s.safetensors")
    assert len(answers) == 3 and all(len(one) == 10 for one in answers)
    assert all(facts.turn_end_id not in a for one in answers for a in one)
    scores = samples.partial_scores(model, facts, prompts, answers, (4, 1000), 4096)
    assert np.allclose(scores[1000], scores[0], atol=1e-5)  # no answer is that long
    told = samples.partial_report(scores, answers)
    assert told["first k tokens with whole answer"]["1000"]["prompts"] == 0
    assert -1 <= told["first k tokens with whole answer"]["4"]["mean"] <= 1


def test_baselines_of_the_base_model(world: Path) -> None:
    """The likelihood of an answer equals the causal model's own loss on it."""
    from transformers import AutoModelForCausalLM

    make_tiny_llama(world / "tied", tie_word_embeddings=True)
    _, facts = backbone.load_tokenizer(world / "tied")
    loaded = _pairs_of(world)[:4]
    classifier = backbone.load_backbone(world / "tied", facts, torch.float32)
    base = backbone.RewardModel(classifier, 0, 0.0, 0.0).eval()
    found = evaluation.mean_log_likelihoods(base, loaded, facts, 4096)
    causal = AutoModelForCausalLM.from_pretrained(world / "tied").eval()
    row = torch.from_numpy(pairs.sequences(loaded, facts)[1].astype(np.int64))[None]
    labels = row.clone()
    labels[:, : len(loaded[0].prompt)] = -100
    with torch.no_grad():
        loss = causal(row, labels=labels).loss
    assert found[0, 1] == pytest.approx(-float(loss), abs=1e-4)
    told = evaluation.baselines(base, loaded, facts, 4096)
    assert set(told) == {"longer answer", "mean log-likelihood", "untrained head"}


def _pairs_of(world: Path) -> list[pairs.Pair]:
    tokenizer, _ = backbone.load_tokenizer(world / "model")
    records = pairs.read_records(world / "valid.jsonl.gz")
    return pairs.encode_records(records, tokenizer, 96)[0]
