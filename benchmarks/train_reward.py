"""Trains a reward model (LoRA and a scalar head, or every weight) on preference pairs.

    python benchmarks/train_reward.py --train train.jsonl.gz --valid valid.jsonl.gz --out my-reward

Any causal model with a chat template that `transformers` reads as a sequence classifier will do
(Llama, Mistral, Qwen2, Qwen3; a folder, a GGUF file or the embedded SmolLM2). The run resumes
from `<out>/checkpoint`, is the same for the same seed, and writes the adapter (`--rank 0`: a whole
model with its tokenizer), `config.json` and `metrics.json`; `main.py --reward_model_name <out>`
scores as it was trained. A GPU is wanted for real training; a CPU does for small trials.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reward_training import backbone, evaluation, package, pairs, samples, training

logger = logging.getLogger("train_reward")

CUTS = (16, 32, 64, 128)
SAMPLE_CANDIDATES, SAMPLE_TOKENS = 32, 384


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train", type=Path, help="pairs: .jsonl, .jsonl.gz or a tokens file (.safetensors)")
    add("--valid", type=Path, help="pairs that only the final report sees")
    add("--out", type=Path, required=True, help="folder for the adapter, its config and checkpoint")
    add("--model", default=backbone.EMBEDDED_MODEL, help="model folder, GGUF file or embedded name")
    add("--base_name", help="the base model in config.json (default: --model as given)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--max_batch_tokens", type=int, default=32768, help="padded tokens of one forward pass")
    add("--checkpoint_steps", type=int, default=100)
    add("--stop_step", type=int, help="stop after this step, with a checkpoint")
    add("--compile", action="store_true", help="compile the layers (pays from some minutes on)")
    add("--tokenize_only", action="store_true", help="write <out>/{train,valid}.safetensors, stop")
    add("--evaluate_only", action="store_true", help="report on the model that is in --out")
    add("--baselines", action="store_true", help="also report the three baselines on --valid")
    add("--samples", type=Path, help="samples file for scores of unfinished answers")
    add("--sample_prompts", type=Path, help="prompt file; writes --samples if it is missing")
    for name, value in _recipe_defaults().items():
        add(f"--{name}", type=type(value), default=value, help=f"default {value}")
    args = parser.parse_args(argv)
    if not args.evaluate_only and args.train is None and args.sample_prompts is None:
        parser.error("--train is needed, unless --evaluate_only reports on a trained model")
    if args.rank == 0 and args.evaluate_only:
        parser.error("--evaluate_only reads adapters; rank 0 writes a whole model")
    return args


def _recipe_defaults() -> dict[str, Any]:
    return asdict(training.Recipe())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    recipe = training.Recipe(**{name: getattr(args, name) for name in _recipe_defaults()})
    base = backbone.find_model(args.model)
    tokenizer, facts = backbone.load_tokenizer(base)
    scoring = package.scoring_facts(tokenizer, facts, recipe.max_length)
    logger.info("%s; the score is read at %s (%d)", base.name, facts.turn_end, facts.turn_end_id)
    sets = {
        name: load_set(path, tokenizer, facts, recipe.max_length)
        for name, path in (("train", args.train), ("valid", args.valid))
        if path is not None
    }
    if args.tokenize_only:
        for name, loaded in sets.items():
            pairs.save_pairs(loaded, facts, args.out / f"{name}.safetensors")
        return {}
    if args.sample_prompts and args.samples and not args.samples.exists():
        make_samples(args, base, tokenizer, facts)
    if not (args.evaluate_only or "train" in sets):
        return {}
    metrics: dict[str, Any] = {"versions": versions(args.device)}
    if not args.evaluate_only:
        model, metrics["training"] = train(
            args, recipe, base, tokenizer, facts, scoring, sets["train"]
        )
    if recipe.rank:  # what is reported is what was written
        model, _, _ = package.load_package(args.out, base, torch.device(args.device))
    metrics.update(evaluate(args, model, facts, sets.get("valid")))
    if args.baselines and "valid" in sets:
        metrics["baselines"] = base_report(args, base, facts, sets["valid"])
    write_metrics(args.out / "metrics.json", metrics)
    print_report(metrics)
    return metrics


def load_set(path: Path, tokenizer: Any, facts: pairs.Facts, max_length: int) -> list[pairs.Pair]:
    if path.suffix == ".safetensors":
        loaded, theirs = pairs.load_pairs(path)
        if theirs != facts:
            raise ValueError(f"{path} was made for {theirs}, the model has {facts}")
        return loaded
    loaded, skipped = pairs.encode_records(pairs.read_records(path), tokenizer, max_length)
    logger.info("%s: %d pairs, %d with an over-long prompt left out", path, len(loaded), skipped)
    return loaded


def train(
    args: argparse.Namespace,
    recipe: training.Recipe,
    base: Path,
    tokenizer: Any,
    facts: pairs.Facts,
    scoring: dict[str, Any],
    loaded: list[pairs.Pair],
) -> tuple[backbone.RewardModel, dict[str, Any]]:
    device = torch.device(args.device)
    frozen = torch.bfloat16 if device.type == "cuda" and recipe.rank else torch.float32
    torch.manual_seed(recipe.seed)  # LoRA's A
    classifier = backbone.load_backbone(base, facts, frozen)
    model = backbone.RewardModel(classifier, recipe.rank, recipe.lora_alpha, recipe.lora_dropout)
    model.to(device)
    if device.type == "cuda":
        model.trust_autocast()
    if args.compile:
        for layer in model.decoder.layers:
            layer.compile(dynamic=True)
    kept, held_out = pairs.split_by_group(loaded, recipe.holdout, recipe.seed)
    count = sum(p.numel() for p in model.trained().values())
    logger.info("%d pairs, %d held out, %d trained weights", len(kept), len(held_out), count)
    trainer = training.Trainer(
        model, facts, recipe, args.out, args.max_batch_tokens, args.checkpoint_steps
    )
    begin = time.monotonic()
    progress = trainer.fit(kept, held_out, args.stop_step)
    told = {
        "train_pairs": len(kept),
        "held_out_pairs": len(held_out),
        "trained_weights": count,
        "steps": progress.step,
        "kept_epoch": progress.best_epoch,
        "history": progress.history,
        "elapsed_sec": round(time.monotonic() - begin, 1),
    }
    name = args.base_name or args.model
    package.save_package(model, tokenizer, args.out, name, base, recipe, scoring, told)
    return model.eval(), told


def make_samples(args: argparse.Namespace, base: Path, tokenizer: Any, facts: pairs.Facts) -> None:
    records = json.loads(args.sample_prompts.read_text())
    prompts = [
        pairs.encode_prompt(pairs.messages_of(r), tokenizer, args.max_length) for r in records
    ]
    answers = samples.draw_samples(
        base, facts, prompts, SAMPLE_CANDIDATES, SAMPLE_TOKENS, torch.device(args.device), args.seed
    )
    samples.save_samples(args.samples, prompts, answers)


def evaluate(
    args: argparse.Namespace,
    model: backbone.RewardModel,
    facts: pairs.Facts,
    valid: list[pairs.Pair] | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if valid:
        found["valid"] = evaluation.evaluate(model, valid, facts, args.max_batch_tokens)
        if args.device != "cpu":
            in_bfloat16 = evaluation.evaluate(model, valid, facts, args.max_batch_tokens, True)
            found["valid in bfloat16"] = in_bfloat16["overall"]
    if args.samples:
        prompts, answers = samples.load_samples(args.samples)
        scores = samples.partial_scores(
            model, facts, prompts, answers, CUTS, 2 * args.max_batch_tokens
        )
        found["samples"] = samples.partial_report(scores, answers)
    return found


def base_report(
    args: argparse.Namespace, base: Path, facts: pairs.Facts, valid: list[pairs.Pair]
) -> dict[str, Any]:
    classifier = backbone.load_backbone(base, facts, torch.float32).to(args.device)
    model = backbone.RewardModel(classifier, 0, 0.0, 0.0).eval()
    return evaluation.baselines(model, valid, facts, args.max_batch_tokens)


def versions(device: str) -> dict[str, str]:
    names = {name: version(name) for name in ("torch", "transformers", "peft", "safetensors")}
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {"python": platform.python_version(), **names, "device": gpu}


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    path.write_text(json.dumps(metrics, indent=1, allow_nan=False) + "\n")


def print_report(metrics: dict[str, Any]) -> None:
    if "valid" in metrics:
        valid = metrics["valid"]
        print(evaluation.table("set", {"all": valid["overall"], **valid["kind"]}))
        print(evaluation.table("source", valid["source"]))
    if "baselines" in metrics:
        print(evaluation.table("baseline", metrics["baselines"]))
    overall = metrics.get("valid", {}).get("overall", {})
    print(json.dumps({"accuracy": overall.get("accuracy"), "pairs": overall.get("pairs")}))


if __name__ == "__main__":
    main()
