"""Time each decode kernel at the shapes that matter, beside its share of the copy bandwidth.

    python benchmarks/bench_kernels.py                    the launches that the suite uses
    python benchmarks/bench_kernels.py --sweep --workers 12   other launch settings too

Every time is the median of CUDA graph replays over buffers that are several times the L2 cache, as
the layers of a model are. Bytes are the fewest that the kernel must move. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.decode_state import padded_ids
from engine.kernels import activation, attention, launch, norm, rope_append, sample
from engine.sampler import SamplingParams
from suite.backend import PAGE_SIZE

LLAMA = SimpleNamespace(name="llama-8b", heads=32, kv_heads=8, dim=128, hidden=4096, inner=14336)
SMOL = SimpleNamespace(name="smollm2-135m", heads=9, kv_heads=3, dim=64, hidden=576, inner=1536)
DTYPE = torch.bfloat16
ROTATE_BYTES = 400e6  # of buffers to go round, so that no call finds its data in the L2 cache


@dataclass(frozen=True, slots=True)
class Case:
    """`make` allocates and gives the calls to time in turn."""

    name: str
    setting: str
    num_bytes: float
    make: Callable[[], list[Callable[[], object]]]
    num_operations: float = 0.0


def scalar(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32, device="cuda")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def copies(num_bytes: float) -> int:
    return max(1, min(16, math.ceil(ROTATE_BYTES / num_bytes)))


def time_sec(calls: list[Callable[[], object]], num_replays: int = 15) -> float:
    """Median seconds of one call, over replays of a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(num_replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(calls))
    return sorted(times[2:])[num_replays // 2]


def copy_bandwidth() -> float:
    """Bytes a second of a device copy, read and written bytes both counted."""
    source = randn(1 << 31)
    target = torch.empty_like(source)  # NOTE: in a graph, copy_ is the copy engine's, and slower
    return 2 * source.nbytes / time_sec([lambda: torch.neg(source, out=target)])


def default_plan(shape: SimpleNamespace, rows: int, prompt: int) -> attention.AttentionPlan:
    return attention.plan_attention(rows, shape.heads, shape.kv_heads, DTYPE, prompt)


def attention_calls(
    shape: SimpleNamespace,
    rows: int,
    own: int,
    prompt: int,
    plan: attention.AttentionPlan,
    part: str,
) -> list[Callable[[], object]]:
    """One call a layer, with as many layers as it takes to pass the L2 cache."""
    page_size = PAGE_SIZE["cuda"]
    columns = -(-max(own, 1) // page_size)
    num_pages = rows * columns + 1 if part != "prefix" else 1
    bytes_a_layer = 4 * num_pages * shape.kv_heads * page_size * shape.dim
    num_layers = copies(bytes_a_layer if part != "prefix" else 40e6)
    pages = randn(num_layers, 2, num_pages, shape.kv_heads, page_size, shape.dim)
    prefix = randn(num_layers, 2, shape.kv_heads, max(prompt, 1), shape.dim)
    table = torch.zeros(rows, columns, dtype=torch.int32, device="cuda")
    if part != "prefix":
        table.copy_((torch.randperm(num_pages - 1, device="cuda") + 1).view(rows, columns))
    q = randn(num_layers, rows, shape.heads, shape.dim)
    workspace = attention.make_workspace({rows: plan}, shape.heads, shape.dim, DTYPE, "cuda")
    out = torch.empty(rows, shape.heads * shape.dim, device="cuda", dtype=DTYPE)
    length, prefix_len, scale = scalar(own), scalar(prompt), shape.dim**-0.5

    def call(layer: int) -> None:
        own, shared = (*pages[layer], table, length), (*prefix[layer], prefix_len)
        if part == "prefix":
            attention.prefix_attention(q[layer], *shared, plan, workspace, scale)
        elif part == "suffix":
            attention.suffix_attention(q[layer], *own, plan, workspace, out, scale)
            if plan.suffix_splits > 1:
                attention.combine_parts(q[layer], length, plan, workspace, out)
        else:
            attention.decode_attention(q[layer], *own, *shared, plan, workspace, out)

    return [lambda layer=layer: call(layer) for layer in range(num_layers)]


def attention_case(
    shape: SimpleNamespace, rows: int, own: int, prompt: int, part: str = "both", **changes: int
) -> Case:
    plan = replace(default_plan(shape, rows, prompt), **changes)
    kv = 4.0 * shape.kv_heads * shape.dim  # bytes of a token's key and value
    queries = 4.0 * rows * shape.heads * shape.dim  # read, and written as the output
    num_bytes = queries + kv * (prompt if part != "suffix" else 0)
    num_bytes += kv * rows * own if part != "prefix" else 0
    operations = 4.0 * rows * prompt * shape.heads * shape.dim if part != "suffix" else 0.0
    setting = " ".join(f"{key}={value}" for key, value in changes.items())
    return Case(
        f"{shape.name} attention {part} rows {rows} own {own} prompt {prompt}",
        setting or "default",
        num_bytes,
        lambda: attention_calls(shape, rows, own, prompt, plan, part),
        operations,
    )


def small_cases(shape: SimpleNamespace, rows: int) -> Iterator[Case]:
    hidden, inner, dim = shape.hidden, shape.inner, shape.dim
    width = (shape.heads + 2 * shape.kv_heads) * dim

    def norm_calls() -> list[Callable[[], object]]:
        x, residual, weight = randn(8, rows, hidden), randn(8, rows, hidden), randn(hidden)
        return [lambda i=i: norm.add_rms_norm(x[i], residual[i], weight, 1e-5) for i in range(8)]

    def silu_calls() -> list[Callable[[], object]]:
        gate_up = randn(8, rows, 2 * inner)
        return [lambda i=i: activation.silu_mul(gate_up[i]) for i in range(8)]

    def rope_calls() -> list[Callable[[], object]]:
        qkv = randn(8, rows, width)
        pages = randn(2, rows + 1, shape.kv_heads, PAGE_SIZE["cuda"], dim)
        table = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda").view(rows, 1)
        angles = torch.randn(4096, dim // 2, device="cuda")
        at = (angles.cos(), angles.sin(), scalar(100), scalar(20), *pages, table)
        return [lambda i=i: rope_append.rope_append(qkv[i], *at) for i in range(8)]

    where = f"{shape.name} rows {rows}"
    yield Case(f"{where} add_rms_norm", "default", 8.0 * rows * hidden, norm_calls)
    yield Case(f"{where} silu_mul", "default", 6.0 * rows * inner, silu_calls)
    yield Case(f"{where} rope_append", "default", 4.0 * rows * width, rope_calls)


def sampler_case(
    rows: int, vocab: int, params: SamplingParams, dtype: torch.dtype = DTYPE, **changes: int
) -> Case:
    def make() -> list[Callable[[], object]]:
        logits = (torch.randn(rows, vocab, device="cuda") * 2).to(dtype)
        tuning = replace(sample.SamplerTuning(), **changes)
        sampler = sample.DeviceSampler(params, vocab, rows, "cuda", tuning)
        key = torch.tensor([1, 2], dtype=torch.int32, device="cuda")
        tokens = torch.zeros(rows, 64, dtype=torch.int32, device="cuda")
        last = torch.zeros(rows, dtype=torch.int64, device="cuda")
        done = torch.zeros(rows, dtype=torch.int32, device="cuda")
        bad = torch.zeros(rows, dtype=torch.bool, device="cuda")
        stops = padded_ids([1, 2]).cuda()
        state = (key, torch.arange(rows, device="cuda"), scalar(5), tokens, last, done, bad, stops)
        return [lambda: sampler(logits, *state)] * 4

    what = f"t {params.temperature:g} top_k {params.top_k} top_p {params.top_p:g}"
    setting = " ".join(f"{key}={value}" for key, value in changes.items())
    name = f"sample rows {rows} vocab {vocab} {str(dtype)[6:]} {what}"
    return Case(name, setting or "default", float(rows * vocab * dtype.itemsize), make)


def default_cases() -> Iterator[Case]:
    for rows, own in itertools.product((120, 480, 960), (128, 256, 512)):
        yield attention_case(LLAMA, rows, own, 0, "suffix")
    for rows, prompt in itertools.product((120, 480, 960), (128, 2048)):
        yield attention_case(LLAMA, rows, 0, prompt, "prefix")
        yield attention_case(LLAMA, rows, 256, prompt)
    for rows in (1, 4, 30):
        yield attention_case(LLAMA, rows, 4000, 2048)
        yield attention_case(LLAMA, rows, 256, 128)
    for rows in (120, 1000, 8000):
        yield attention_case(SMOL, rows, 128, 128, "suffix")
        yield attention_case(SMOL, rows, 128, 128)
    for shape, rows in ((LLAMA, 120), (LLAMA, 480), (LLAMA, 960), (SMOL, 120), (SMOL, 8000)):
        yield from small_cases(shape, rows)
    for rows, vocab in ((1, 128_256), (120, 128_256), (480, 128_256), (960, 128_256)):
        yield sampler_case(rows, vocab, SamplingParams())
    yield sampler_case(8000, 49_152, SamplingParams())
    yield sampler_case(480, 128_256, SamplingParams(), torch.float32)
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=0),
        SamplingParams(top_k=0, top_p=0.9),
        SamplingParams(temperature=0.3, top_k=0, top_p=0.9),  # narrow: the first pass is enough
        SamplingParams(top_k=1000),
    ):
        yield sampler_case(480, 128_256, params)


def sweep_cases() -> Iterator[Case]:
    for (shape, rows, own), (block, warps, stages) in itertools.product(
        ((LLAMA, 480, 256), (LLAMA, 120, 256), (SMOL, 8000, 128)),
        ((64, 4, 3), (64, 4, 2), (64, 2, 3), (32, 4, 4), (32, 2, 3)),
    ):
        launch = {"suffix_block_n": block, "suffix_warps": warps, "suffix_stages": stages}
        yield attention_case(shape, rows, own, 0, "suffix", **launch)
    for (rows, own), splits in itertools.product(
        itertools.product((1, 4, 12, 20), (256, 4000)), (1, 2, 4, 16)
    ):
        yield attention_case(LLAMA, rows, own, 0, "suffix", suffix_splits=splits)
    for (rows, prompt), (m, n, warps, stages) in itertools.product(
        ((480, 2048), (120, 2048), (120, 128), (960, 128)), ((128, 64, 8, 3), (64, 64, 4, 3))
    ):
        launch = {"prefix_block_m": m, "prefix_block_n": n, "prefix_warps": warps}
        yield attention_case(LLAMA, rows, 0, prompt, "prefix", **launch, prefix_stages=stages)
    for (rows, vocab), (tile, warps) in itertools.product(
        ((480, 128_256), (8000, 49_152)), ((8, 2), (8, 4), (16, 4))
    ):
        launch = {"pick_tile": tile, "pick_warps": warps, "pick_warps_many": warps}
        yield sampler_case(rows, vocab, SamplingParams(), **launch)
    for block, warps in ((1024, 4), (2048, 8), (4096, 8), (4096, 16)):
        launch = {"whole_block": block, "whole_warps": warps}
        yield sampler_case(480, 128_256, SamplingParams(top_k=1000, top_p=0.9), **launch)
        yield sampler_case(8, 128_256, SamplingParams(top_k=1000, top_p=0.9), **launch)


def warm_up(cases: list[Case], workers: int) -> None:
    """Compile in parallel: each worker runs its share of the cases once, into Triton's cache."""
    flags = [flag for flag in sys.argv[1:] if flag in ("--sweep", "--late")]
    commands = [
        [sys.executable, __file__, *flags, "--share", f"{i}/{workers}"] for i in range(workers)
    ]
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()


def measure(case: Case, bandwidth: float) -> dict[str, object]:
    try:
        seconds = time_sec(case.make())
    except Exception as e:  # a launch setting that the device refuses is a result too
        return {"name": case.name, "setting": case.setting, "error": str(e)[:80]}
    return {
        "name": case.name,
        "setting": case.setting,
        "us": round(seconds * 1e6, 2),
        "bandwidth_share": round(case.num_bytes / seconds / bandwidth, 3),
        "tflops": round(case.num_operations / seconds / 1e12, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="time other launch settings too")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile first")
    parser.add_argument("--late", action="store_true", help="without programmatic early starts")
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.late:
        launch.MAX_ROWS = 0
    cases = [*default_cases(), *(sweep_cases() if args.sweep else ())]
    cases = [case for case in cases if args.only in case.name]
    if args.share:
        index, workers = map(int, args.share.split("/"))
        for case in cases[index::workers]:
            case.make()[0]()
            torch.cuda.synchronize()
        return
    if args.workers:
        warm_up(cases, args.workers)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s")
    results = []
    for case in cases:
        result = measure(case, bandwidth)
        results.append(result)
        time, share = result.get("us", result.get("error")), result.get("bandwidth_share", "")
        print(f"{case.name:64s} {case.setting:44s} {time:>9} us {share:>6} {result.get('tflops')}")
    print(json.dumps({"copy_bytes_a_second": bandwidth, "results": results}))


if __name__ == "__main__":
    main()
