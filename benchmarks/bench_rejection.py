"""Milliseconds of a rejection: dropping half of the rows, and refilling them with forks.

    python benchmarks/bench_rejection.py --shape smollm2-135m --rows 2000 --tokens 500

Only the cache is built (no weights): a rejection changes the table of pages and copies nothing but
the last, partly filled page of each fork. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shapes import SHAPES, sync
from engine.kv_cache import PagedKV
from suite import backend


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def one_round(cache: PagedKV, rows: int, tokens: int) -> tuple[float, float]:
    """Seconds of (dropping every other row, forking each survivor once)."""
    cache.clear()
    cache.add_rows(rows)
    cache.grow(tokens)
    sync(cache.k.device)
    start = time.perf_counter()
    cache.select(range(0, rows, 2))
    sync(cache.k.device)
    dropped = time.perf_counter()
    survivors = list(range(cache.num_rows))
    cache.select(survivors + survivors)
    sync(cache.k.device)
    return dropped - start, time.perf_counter() - dropped


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    page_size = backend.PAGE_SIZE[device.type]
    config = SHAPES[args.shape]
    cache = PagedKV(
        config,
        num_pages=args.rows * -(-args.tokens // page_size),
        page_size=page_size,
        max_rows=args.rows,
        max_row_tokens=args.tokens,
        max_prompt=1,
        dtype=torch.bfloat16,
        device=device,
    )
    rounds = [one_round(cache, args.rows, args.tokens) for _ in range(args.repeats + 1)][1:]
    drop, fork = (1e3 * sorted(column)[len(column) // 2] for column in zip(*rounds, strict=True))
    kv_bytes = args.rows * args.tokens * config.kv_bytes_per_token(2)
    print(f"{args.shape}: {args.rows} rows x {args.tokens} tokens ({kv_bytes / 1e9:.1f} GB of KV): "
          f"drop half {drop:.2f} ms, fork the rest {fork:.2f} ms")  # fmt: skip
    print(json.dumps({"shape": args.shape, "rows": args.rows, "tokens": args.tokens,
                      "drop_ms": drop, "fork_ms": fork, "kv_bytes": kv_bytes}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
