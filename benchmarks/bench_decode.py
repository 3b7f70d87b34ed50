"""Milliseconds a decode step, on any device: our engine beside `transformers` generate.

    python benchmarks/bench_decode.py --shape llama-3-8b --cases 128x120,128x480,2048x480

A case is PROMPTxROWS. Random weights of the shape, top-k 50, no row ever stops. Prints a table with
the share of the measured copy bandwidth and matrix rate, and the floor (the step's matrices alone,
as a CUDA graph); the last line is JSON. `transformers` runs the first case, or those that
--transformers names; --vllm names cases for vLLM, where it is installed, in a process of its own
that ends before ours takes memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shapes import (
    SHAPES,
    device_ceilings,
    random_model,
    seconds,
    sync,
    transformers_config,
    transformers_twin,
)
from engine.decoder import Decoder
from engine.kv_cache import PagedKV
from engine.memory import peak_bytes
from engine.model import Transformer
from engine.stepper import padded
from suite import backend
from suite.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One measurement: a prompt of this many tokens, this many rows."""

    prompt: int
    rows: int


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--cases", default="128x120,128x480,128x960,2048x480,128x4000")
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(backend.DTYPES))
    parser.add_argument("--top_k", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--transformers", help="cases for generate, or none (default: the first case)"
    )
    parser.add_argument("--vllm", default="", help="cases to run through vLLM as well")
    parser.add_argument("--vllm_alone", action="store_true", help="the cases of --vllm, no others")
    parser.add_argument("--skip_floor", action="store_true")
    args = parser.parse_args(argv)
    if args.transformers is None:
        args.transformers = args.cases.split(",")[0]
    return args


def cases_of(text: str) -> list[Case]:
    """The cases that are named; none for "none" and for nothing."""
    names = [] if text == "none" else text.split(",")
    return [Case(*map(int, case.split("x"))) for case in names if case]


def make_decoder(model: Transformer, case: Case, new_tokens: int, top_k: int) -> Decoder:
    """The engine as a run would assemble it."""
    page_size = backend.PAGE_SIZE[model.device.type]
    pages = case.rows * -(-new_tokens // page_size)
    cache = PagedKV(
        model.config,
        num_pages=pages,
        page_size=page_size,
        max_rows=padded(case.rows),
        max_row_tokens=new_tokens,
        max_prompt=case.prompt,
        dtype=model.dtype,
        device=model.device,
    )
    return Decoder(
        model,
        backend.make_ops(model.device, model.dtype),
        cache,
        backend.make_sampler(Settings(top_k=top_k), model),
        [],
        max_rows=case.rows,
        look_every=backend.STEPS_BETWEEN_LOOKS[model.device.type],
        max_rows_at_once=backend.MAX_ROWS_AT_ONCE,
        stepper=backend.make_stepper(model.device, model.dtype),
    )


def measure(model: Transformer, case: Case, args: argparse.Namespace) -> dict:
    """Seconds of decoding `new_tokens` of every row, the best and the median of the repeats."""
    decoder = make_decoder(model, case, args.new_tokens, args.top_k)
    prompt = torch.randint(0, model.config.vocab_size, (case.prompt,)).tolist()
    times, prefill = [], []
    for repeat in range(args.repeats + 1):  # the first records the graphs
        sync(model.device)
        start = time.perf_counter()
        decoder.start(prompt, repeat, range(case.rows))
        sync(model.device)
        prefill.append(time.perf_counter() - start)
        start = time.perf_counter()
        decoder.run(args.new_tokens)
        sync(model.device)
        times.append(time.perf_counter() - start)
    median = sorted(times[1:])[len(times[1:]) // 2]
    steps = args.new_tokens - 1
    return {
        "prompt": case.prompt,
        "rows": case.rows,
        "ms_per_step": 1e3 * median / steps,
        "ms_per_step_best": 1e3 * min(times[1:]) / steps,
        "tokens_per_sec": case.rows * steps / median,
        "prefill_ms": 1e3 * min(prefill[1:]),
        "first_run_extra_sec": times[0] - median,
        "peak_memory_bytes": peak_bytes(model.device),
    }


def floor_ms(model: Transformer, rows: int) -> float:
    """The matrices of one step alone, as a graph on a GPU."""
    c = model.config
    x = torch.randn(rows, c.hidden_size, dtype=model.dtype, device=model.device)
    wide = torch.randn(rows, c.intermediate_size, dtype=model.dtype, device=model.device)
    heads = torch.randn(rows, c.num_heads * c.head_dim, dtype=model.dtype, device=model.device)

    def matrices() -> None:
        for layer in model.layers:
            linear(x, layer.qkv)
            linear(heads, layer.o)
            linear(x, layer.gate_up)
            linear(wide, layer.down)
        linear(x, model.lm_head)

    if model.device.type != "cuda":
        return 1e3 * seconds(matrices, model.device, 3)
    matrices()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matrices()
    return 1e3 * seconds(graph.replay, model.device, 20)


def limits(model: Transformer, case: Case, row: dict, ceilings: tuple[float, float]) -> dict:
    """Shares of the device's measured limits at the mean length."""
    c, size = model.config, model.dtype.itemsize
    parameters = c.num_layer_params + c.vocab_size * c.hidden_size
    kv = c.kv_bytes_per_token(size) * (case.prompt + case.rows * row["mean_length"])
    sec = row["ms_per_step"] / 1e3
    return {
        "bandwidth_share": (parameters * size + kv) / sec / ceilings[0],
        "matrix_share": 2 * parameters * case.rows / sec / ceilings[1],
    }


def generate_ms(model: Transformer, case: Case, args: argparse.Namespace) -> float:
    """`transformers` generate on the same shape, ms a step."""
    theirs = transformers_twin(model, "LlamaForCausalLM")
    ids = torch.randint(0, model.config.vocab_size, (1, case.prompt), device=model.device)
    ids = ids.expand(case.rows, -1)

    def run(new: int) -> float:
        sync(model.device)
        start = time.perf_counter()
        theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=args.top_k,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        sync(model.device)
        return time.perf_counter() - start

    run(4)
    few, many = run(4), run(36)  # the difference leaves the prefill out
    return 1e3 * (many - few) / 32


def vllm_alone(args: argparse.Namespace) -> int:
    """Milliseconds a step of vLLM on the shape with dummy weights, by case, as a JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        save_config(args.shape, folder)
        times = vllm_ms(folder, cases_of(args.vllm), args)
    print(json.dumps(times))
    return 0


def save_config(shape: str, folder: str) -> None:
    """A model folder that has a config and nothing else."""
    transformers_config(SHAPES[shape], architectures=["LlamaForCausalLM"]).save_pretrained(folder)


def vllm_ms(folder: str, cases: Sequence[Case], args: argparse.Namespace) -> dict[str, float]:
    """One engine for all cases; the same prompt for every row, its KV shared by prefix caching."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype or "bfloat16",
        max_model_len=max(case.prompt for case in cases) + args.new_tokens,
        max_num_seqs=max(case.rows for case in cases),
        enable_prefix_caching=True,
    )

    def run(case: Case, new: int) -> float:
        prompt = torch.randint(0, SHAPES[args.shape].vocab_size, (case.prompt,),
                               generator=torch.Generator().manual_seed(0)).tolist()  # fmt: skip
        sampling = SamplingParams(
            temperature=1.0, top_k=args.top_k, max_tokens=new, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        engine.generate([{"prompt_token_ids": prompt}] * case.rows, sampling, use_tqdm=False)
        return time.perf_counter() - start

    found = {}
    for case in cases:
        run(case, args.new_tokens)
        few = min(run(case, 1) for _ in range(args.repeats))  # the difference leaves the prompt out
        many = min(run(case, args.new_tokens) for _ in range(args.repeats))
        found[f"{case.prompt}x{case.rows}"] = 1e3 * (many - few) / (args.new_tokens - 1)
    return found


def vllm_apart(args: argparse.Namespace) -> dict[str, float]:
    """`vllm_alone` in another process, which gives all of its memory back."""
    line = [sys.executable, __file__, "--vllm_alone", "--shape", args.shape, "--vllm", args.vllm]
    line += ["--new_tokens", str(args.new_tokens), "--top_k", str(args.top_k)]
    line += ["--repeats", str(args.repeats), *(["--dtype", args.dtype] if args.dtype else [])]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"vLLM ended with exit code {done.returncode}; its messages are above", flush=True)
        return {}
    lines = reversed(done.stdout.splitlines())  # its engine may still log behind ours
    return json.loads(next(text for text in lines if text.startswith("{")))


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.vllm and importlib.util.find_spec("vllm") is None:
        print("--vllm: vllm is not installed; leave it out, or pip install vllm", file=sys.stderr)
        return 2
    if args.vllm_alone:
        return vllm_alone(args)
    by_vllm = vllm_apart(args) if args.vllm else {}
    device = torch.device(args.device)
    default = "bfloat16" if device.type == "cuda" else "float32"
    dtype = backend.DTYPES[args.dtype or default]
    model = random_model(args.shape, dtype, device)
    ceilings = device_ceilings(device)
    print(f"{backend.device_name(device)}: copy {ceilings[0] / 1e12:.2f} TB/s, "
          f"matrices {ceilings[1] / 1e12:.0f} TFLOP/s")  # fmt: skip
    rows = []
    for case in cases_of(args.cases):
        row = measure(model, case, args)
        row["mean_length"] = args.new_tokens / 2
        row |= limits(model, case, row, ceilings)
        row["floor_ms"] = None if args.skip_floor else floor_ms(model, case.rows)
        if case in cases_of(args.transformers):
            row["transformers_ms"] = generate_ms(model, case, args)
        row["vllm_ms"] = by_vllm.get(f"{case.prompt}x{case.rows}")
        rows.append(row)
        print(
            f"P {case.prompt:5d}  rows {case.rows:5d}  {row['ms_per_step']:8.3f} ms/step  "
            f"floor {row['floor_ms'] or 0:8.3f}  {row['tokens_per_sec']:10.0f} tok/s  "
            f"bandwidth {row['bandwidth_share']:.0%}  matrices {row['matrix_share']:.0%}  "
            f"prefill {row['prefill_ms']:.1f} ms  peak {row['peak_memory_bytes'] / 1e9:.2f} GB  "
            f"transformers {row.get('transformers_ms', float('nan')):.1f} ms  "
            f"vLLM {row['vllm_ms'] or float('nan'):.3f} ms",
            flush=True,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"shape": args.shape, "dtype": str(dtype), "device": str(
        backend.device_name(device)), "versions": backend.versions(), "rows": rows}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
