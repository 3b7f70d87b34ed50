"""Whole runs of both methods with random weights: seconds by phase, rounds, predicted memory.

    python benchmarks/bench_run.py --shape llama-3-8b --prompt 128 --runs "--batch_size 120" \
        "--speculative_rejection" "--speculative_rejection --reward_cache off"

Each run is a set of main.py's flags. The models are built once; answers never stop by themselves
(--ignore_stop), so every run is the worst case in length. Texts mean nothing: speed and memory
only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shapes import SHAPES, random_model
from generator import Generator
from rewards.heads import LinearHead
from rewards.loading import RewardModel
from suite import arguments, assembly, backend
from suite.chat import Format
from suite.progress import Progress
from suite.prompts import Prompt


class IdChat:
    """Stands for a tokenizer: the prompt is random ids, answers have no text."""

    def __init__(self, num_tokens: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocab, (num_tokens,), generator=generator).tolist()
        self.stop_ids = [0]
        self.after_ids = [1]
        self.form = Format("", "", "")
        self.tokenizer = self  # the same object on both sides: ids need no text

    def prompt_ids(self, prompt: str) -> list[int]:
        return self.ids

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        return ["" for _ in answers]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--reward_shape", choices=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=1, help="after a first run that records")
    parser.add_argument("--runs", nargs="+", required=True, help="flags of main.py, one run each")
    return parser.parse_args(argv)


def one_run(flags: str, args: argparse.Namespace, model, judge: RewardModel) -> dict:
    """Run a prompt with these flags; what the JSON object records, in short."""
    device = model.device
    settings = arguments.parse([*shlex.split(flags), "--ignore_stop"])
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    chat = IdChat(args.prompt, model.config.vocab_size)
    judge.chat = chat
    parts = assembly.put_together(settings, chat, model, judge)
    processes = SimpleNamespace(rank=0, world_size=1, is_main=True, device=device)
    generator = Generator(settings, processes, parts)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prompt = Prompt(0, "random ids", {"JSON_idx": 0, "prompt": "random ids"})
    with Progress(1, 0, False) as progress:
        results = [generator.run(prompt, progress) for _ in range(args.repeats + 1)]
    result = results[-1]
    phases: dict[str, float] = {}
    for name, sec in result["clock"]:
        phases[name] = phases.get(name, 0.0) + sec
    plan = result["plan"]
    capacity = plan["pages"] * parts.decoder.cache.page_bytes
    stops = [
        [r["rows"], r["stop_length"], round(r["kv_bytes"] / capacity, 3), r["tokens_scored"]]
        for r in result["rounds"]
    ]
    return {
        "flags": flags,
        "elapsed_sec": result["elapsed_sec"],
        "first_elapsed_sec": results[0]["elapsed_sec"],
        "phases": phases,
        "tokens_generated": result["tokens_generated"],
        "tokens_scored": result["tokens_scored"],
        "kept_reward_cache": plan["keep_reward_cache"],
        "why": plan["why"],
        "rounds": stops,  # rows, stop length, share of the generator's KV in use, tokens read
        "predicted_peak_bytes": plan["predicted_peak_bytes"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "splits": result["out_of_memory_splits"],
    }


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(args.shape, dtype, device)
    backbone = random_model(args.reward_shape or args.shape, dtype, device, seed=1)
    weight = torch.randn(1, backbone.config.hidden_size, device=device)
    rows = []
    for flags in args.runs:
        row = one_run(flags, args, model, RewardModel(backbone, LinearHead(weight), None))
        rows.append(row)
        ratio = row["peak_memory_bytes"] / row["predicted_peak_bytes"]
        print(f"{flags}\n  {row['elapsed_sec']:.2f} s (first {row['first_elapsed_sec']:.2f}), "
              f"{row['tokens_generated']} generated, {row['tokens_scored']} read, peak "
              f"{row['peak_memory_bytes'] / 1e9:.2f} GB = {ratio:.3f} of the prediction, "
              f"reward cache {'kept' if row['kept_reward_cache'] else 'not kept'} "
              f"({row['why']})", flush=True)  # fmt: skip
        print("  " + ", ".join(f"{name} {sec:.3f} s" for name, sec in row["phases"].items()))
        print("  rounds [rows, length, share, read]: " + json.dumps(row["rounds"]), flush=True)
    print(json.dumps({"shape": args.shape, "device": backend.device_name(device), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
