"""Reading speed of the reward model's backbone: useful TFLOP/s of scoring many answers.

    python benchmarks/bench_score.py --shape llama-3-8b --cases 128x960x256,2048x960x256

A case is PROMPTxANSWERSxTOKENS. "Useful" work is what had to be read once: (prompt + answers *
tokens) * 2 * the layers' parameters. Beside it, in the same run: every conversation read from its
start, an incremental round (half of each answer is already cached), and `transformers`' sequence
classifier on right-padded batches. Random weights; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shapes import SHAPES, device_ceilings, random_model, seconds, transformers_twin
from engine.kv_cache import PagedKV
from engine.memory import peak_bytes
from engine.model import Transformer
from engine.plan import REWARD_PAGE_SIZE
from engine.reader import Reader
from suite import backend


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--cases", default="128x120x256,128x960x256,2048x960x256")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(backend.DTYPES))
    parser.add_argument("--chunk_tokens", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--from_start", default="", help="cases to read without sharing as well")
    parser.add_argument("--transformers", default="", help="cases for the classifier as well")
    return parser.parse_args(argv)


class Bench:
    """One case on one model."""

    def __init__(self, model: Transformer, case: tuple[int, int, int], args) -> None:
        self.model, self.args = model, args
        self.prompt_len, self.answers, self.length = case
        random = np.random.default_rng(0)
        vocab = model.config.vocab_size
        self.prompt = random.integers(0, vocab, self.prompt_len)
        self.ids = {
            i: np.concatenate((self.prompt, random.integers(0, vocab, self.length)))
            for i in range(self.answers)
        }
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
        half = {key: ids[: self.prompt_len + self.length // 2] for key, ids in self.ids.items()}
        reader.read(half)
        halves = dict(half)

        def work() -> None:
            reader.read(self.ids)
            reader.cache.truncate(np.full(self.answers, self.length // 2))
            reader._ids = {key: ids[self.prompt_len :] for key, ids in halves.items()}

        return self.time(work)

    def from_start(self) -> float:
        """Seconds of reading each conversation whole (nothing shared)."""
        reader = self.reader(keep=False)
        reader.begin(self.prompt[:1])
        return self.time(lambda: reader.read(self.ids), 1)

    def classifier(self) -> float:
        """Seconds of `transformers`' sequence classifier on padded batches of 120."""
        theirs = transformers_twin(
            self.model, "LlamaForSequenceClassification", num_labels=1, pad_token_id=0
        )
        ids = torch.from_numpy(np.stack(list(self.ids.values()))).to(self.model.device)

        def work() -> None:
            for batch in ids.split(120):
                theirs(batch, attention_mask=torch.ones_like(batch), use_cache=False)

        return self.time(work, 1)


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
        bench = Bench(model, tuple(map(int, text.split("x"))), args)
        tokens = bench.prompt_len + bench.answers * bench.length
        flop = 2 * model.config.num_layer_params
        shared, half = bench.shared(), bench.round()
        row = {
            "case": text,
            "sec": shared,
            "useful_tflops": tokens * flop / shared / 1e12,
            "useful_tflops_all_params": tokens * 2 * model.config.num_params / shared / 1e12,
            "round_sec": half,
            "round_tflops": bench.answers * (bench.length // 2) * flop / half / 1e12,
            "peak_memory_bytes": peak_bytes(device),
        }
        if text in args.from_start.split(","):
            row["from_start_sec"] = bench.from_start()
        if text in args.transformers.split(","):
            row["transformers_sec"] = bench.classifier()
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                        for k, v in row.items()), flush=True)  # fmt: skip
    print(json.dumps({"shape": args.shape, "dtype": str(dtype), "device": backend.device_name(
        device), "chunk_tokens": args.chunk_tokens, "rows": rows}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
