"""Reading speed of the reward model's backbone: useful TFLOP/s of scoring many answers.

    python benchmarks/bench_score.py --shape llama-3-8b --cases 128x120x256~,2048x960x256

A case is PROMPTxANSWERSxTOKENS; with ~ behind it the answers' lengths are drawn from half of TOKENS
to all of them (the mean is printed). "Useful" work is what had to be read once: (prompt + tokens of
all answers) * 2 * the layers' parameters. Beside it, in the same run: every conversation read from
its start, an incremental round (half of each answer is already cached), and `transformers`'
sequence classifier, which pads the same texts on the right. Random weights; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shapes import SHAPES, device_ceilings, random_model, seconds, transformers_twin
from engine.kv_cache import PagedKV
from engine.memory import peak_bytes
from engine.model import Transformer
from engine.plan import REWARD_PAGE_SIZE
from engine.reader import Reader
from suite import backend

PAD = 0  # no text holds it
BATCH = 120  # conversations that the classifier reads at once


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--cases", default="128x120x256~,128x120x256,128x960x256,2048x960x256")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(backend.DTYPES))
    parser.add_argument("--chunk_tokens", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--from_start", default="", help="cases to read without sharing as well")
    parser.add_argument(
        "--transformers", help="cases for the classifier, or none (default: the first case)"
    )
    args = parser.parse_args(argv)
    if args.transformers is None:
        args.transformers = args.cases.split(",")[0]
    return args


class Bench:
    """One case on one model."""

    def __init__(self, model: Transformer, case: str, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.prompt_len, self.answers, self.length = map(int, case.removesuffix("~").split("x"))
        random = np.random.default_rng(0)
        shortest = -(-self.length // 2) if case.endswith("~") else self.length
        self.lengths = random.integers(shortest, self.length + 1, self.answers)
        some = partial(random.integers, PAD + 1, model.config.vocab_size)
        self.prompt = some(self.prompt_len)
        self.ids = {i: np.concatenate((self.prompt, some(n))) for i, n in enumerate(self.lengths)}
        self.chunk = args.chunk_tokens or backend.READ_CHUNK_TOKENS[model.device.type]

    def reader(self, keep: bool) -> Reader:
        pages = -(-self.length // REWARD_PAGE_SIZE) * self.answers if keep else 0
        cache = PagedKV(
            self.model.config,
            num_pages=pages,
            page_size=REWARD_PAGE_SIZE,
            max_rows=self.answers if keep else 0,
            max_row_tokens=self.length,
            max_prompt=self.prompt_len,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        ops = backend.make_ops(self.model.device, self.model.dtype)
        return Reader(self.model, ops, cache, keep=keep, chunk_tokens=self.chunk)

    def time(self, work, repeats: int | None = None) -> float:
        return seconds(work, self.model.device, repeats or self.args.repeats)

    def shared(self) -> float:
        """Seconds of reading the prompt once and all answers."""
        reader = self.reader(keep=False)

        def work() -> None:
            reader.begin(self.prompt)
            reader.read(self.ids)

        return self.time(work)

    def round(self) -> float:
        """Seconds of a round: the second half of each answer, the first being cached."""
        reader = self.reader(keep=True)
        reader.begin(self.prompt)
        halves = {i: self.ids[i][: self.prompt_len + n // 2] for i, n in enumerate(self.lengths)}
        reader.read(halves)

        def work() -> None:
            reader.read(self.ids)
            reader.cache.truncate(self.lengths // 2)
            reader._ids = {key: ids[self.prompt_len :] for key, ids in halves.items()}

        return self.time(work)

    def from_start(self) -> float:
        """Seconds of reading each conversation whole (nothing shared)."""
        reader = self.reader(keep=False)
        reader.begin(self.prompt[:1])
        return self.time(lambda: reader.read(self.ids), 1)

    def classifier(self) -> float:
        """Seconds of `transformers`' sequence classifier on padded batches of `BATCH`."""
        theirs = transformers_twin(
            self.model, "LlamaForSequenceClassification", num_labels=1, pad_token_id=PAD
        )
        batches = [ids.to(self.model.device) for ids in self.padded()]

        def work() -> None:
            for ids in batches:
                theirs(ids, attention_mask=(ids != PAD).long(), use_cache=False)

        return self.time(work, 1)

    def padded(self) -> list[torch.Tensor]:
        """All conversations in batches, each as wide as its longest, padded on the right."""
        texts = [torch.from_numpy(ids) for ids in self.ids.values()]
        return [
            pad_sequence(texts[start : start + BATCH], batch_first=True, padding_value=PAD)
            for start in range(0, len(texts), BATCH)
        ]

    def padded_share(self) -> float:
        """The share of the classifier's tokens that are padding."""
        masks = [ids == PAD for ids in self.padded()]
        return sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    dtype = backend.DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    model = random_model(args.shape, dtype, device)
    ceilings = device_ceilings(device)
    print(f"{backend.device_name(device)}: matrices {ceilings[1] / 1e12:.0f} TFLOP/s")
    rows = []
    for text in args.cases.split(","):
        bench = Bench(model, text, args)
        tokens = bench.prompt_len + int(bench.lengths.sum())
        flop = 2 * model.config.num_layer_params
        shared, half = bench.shared(), bench.round()
        row = {
            "case": text,
            "mean_answer_tokens": float(bench.lengths.mean()),
            "sec": shared,
            "useful_tflops": tokens * flop / shared / 1e12,
            "useful_tflops_all_params": tokens * 2 * model.config.num_params / shared / 1e12,
            "round_sec": half,
            "round_tflops": int((bench.lengths - bench.lengths // 2).sum()) * flop / half / 1e12,
            "peak_memory_bytes": peak_bytes(device),
        }
        if text in args.from_start.split(","):
            row["from_start_sec"] = bench.from_start()
        if text in args.transformers.split(","):
            row["transformers_sec"] = bench.classifier()
            row["transformers_padded_share"] = bench.padded_share()
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                        for k, v in row.items()), flush=True)  # fmt: skip
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"shape": args.shape, "dtype": str(dtype), "device": backend.device_name(
        device), "chunk_tokens": args.chunk_tokens, "rows": rows}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
