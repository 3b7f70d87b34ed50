"""The paper's experiment, whole, on one GPU: Best-of-N and Speculative Rejection, honestly counted.

One process loads both models once and answers each prompt with a pool of Best-of-N candidates
(every smaller N is taken from it), with Speculative Rejection at every alpha and seed, with timed
waves of Best-of-N, and a few prompts with self-reward. Results are lines under OUT, one a prompt
and configuration; the same command goes on where it was stopped, and --max_seconds ends it in good
order. The whole objects of the first prompts lie in OUT/full, for postprocess/. At the end the
report is written (benchmarks/experiment_report.py).

Memory: Speculative Rejection has the bytes in which --fit_rows rows of --max_gen_tokens answer
tokens just fit (computed from the config, printed, stored). Whether the reward model's cache shares
them is --reward_cache; as a side question alpha 0.5 runs the other way.

Seen on one H200 with the default models: 13 to 43 s of start; a prompt 8 s of pool and 2.5 s a
value of alpha and seed; timing 16 s a prompt, self-reward with four alphas 14 s. With --block 120
each process of the paper's runs (seeds 0 to 31, 120 candidates) draws its own stream, and a pool
takes several times as long.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import experiment_report
from benchmarks.experiment_lines import Archive, claimed, failed_line, line_of
from benchmarks.experiment_plan import Config, Size, groups, tasks
from suite.arguments import settings_of
from suite.files import NotWritten
from suite.prompts import Prompt, load_prompts
from suite.settings import Settings

log = logging.getLogger("experiment")
SHARED_FLAGS = (  # of main.py, with its rules
    *("llm_name", "reward_model_name", "model_dir", "dtype", "data_filename"),
    *("max_tokens", "max_gen_tokens", "reward_cache"),
)
ORDER_SEED = 0  # prompts are shuffled: those of a stopped run are a sample of all


class Run:
    """The tasks that are left, in order, until they or the time end."""

    def __init__(
        self, args: argparse.Namespace, base: Settings, size: Size, prompts: list[Prompt]
    ) -> None:
        self.args, self.size, self.prompts = args, size, prompts
        self.archive = Archive(args.out)
        every = tasks(groups(size, base), len(self.prompts), size.chunk_prompts)
        self.left = [
            (position, config)
            for position, config in every
            if (self.prompts[position].json_idx, config.name) not in self.archive.done
        ]
        self.archive.claim(base, size, prompts)
        self.base = base
        self.start = time.perf_counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    def go(self) -> int:
        """The number of tasks done."""
        from benchmarks.experiment_engine import Engine

        engine = Engine(self.base, self.size, [config for _, config in self.left])
        for name, kind in engine.description()["memory"].items():
            print(
                f"memory {name}: {kind['kv_cache_gb']:.4f} GB = {kind['pages']} pages of "
                f"{kind['page_size']} tokens, {kind['rows_at_full_length']} rows at full length",
                flush=True,
            )
        if engine.processes.device.type == "cuda":
            position, config = self.left[0]
            engine.rehearse(config, self.prompts[position])
        print(f"ready after {self.spent:.0f} s, {len(self.left)} tasks", flush=True)
        number = 0
        for position, config in self.left:
            if self._time_is_over(config, number):
                print(f"{number} of {len(self.left)} tasks in {self.spent:.0f} s; run again")
                break
            self._task(engine, position, config)
            number += 1
        self.archive.add_session(
            {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": " ".join(self.args.argv),
                "seconds": round(self.spent, 1),
                "tasks": number,
                **engine.description(),
            }
        )
        return number

    def _time_is_over(self, config: Config, number: int) -> bool:
        """Whether a task like this one would end too late; one is always done."""
        if self.args.max_seconds is None or number == 0:
            return False
        before = self.seconds[config.name] or self.seconds[config.file] or [0.0]
        return self.spent + max(before[-3:]) > self.args.max_seconds

    def _task(self, engine: Any, position: int, config: Config) -> None:
        from generator import PromptFailed

        prompt, start = self.prompts[position], self.spent
        try:
            if prompt.skip is not None:
                raise PromptFailed(prompt.skip)
            items = engine.run(config, prompt)
        except PromptFailed as error:
            self.archive.add(config.file, failed_line(prompt.json_idx, config, str(error)))
            print(f"prompt {prompt.json_idx}, {config.name}: left out, {error}", flush=True)
            return
        line = line_of(prompt.json_idx, config, items, engine.text_of)
        in_full = config.memory == "shared" and config.settings.seed == self.size.seeds[0]
        if in_full and position < self.args.full_prompts:
            engine.store(self.args.out / "full", config, prompt, items[0])
        self.archive.add(config.file, line)
        for name in (config.name, config.file):
            self.seconds[name].append(self.spent - start)
        print(
            f"prompt {prompt.json_idx}, {config.name}: best {line['best']['score']:.3f}, "
            f"{line['elapsed_sec']:.2f} s (+ {line['capture_sec']:.1f} s of recording)",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        size = Size(**{f.name: _tupled(getattr(args, f.name)) for f in fields(Size)})
        base, prompts = _base(args), _prompts(args)
        with claimed(args.out):
            run = Run(args, base, size, prompts)
            number = run.go() if run.left else 0
    except (ValueError, OSError, NotWritten) as error:
        print(f"experiment.py: error: {error}", file=sys.stderr)
        return 2
    pictures = [] if args.pictures else ["--no_pictures"]
    code = experiment_report.main([str(args.out), *pictures])
    return 0 if code == 1 and number < len(run.left) else code  # a part: none is whole yet


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    """The first --num_prompts of the shuffled file."""
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError(f"--num_prompts must be at least 1, got {args.num_prompts}")
    if args.full_prompts < 0:
        raise ValueError(f"--full_prompts must be at least 0, got {args.full_prompts}")
    if args.max_seconds is not None and not 0 < args.max_seconds < math.inf:
        raise ValueError(f"--max_seconds must be above 0, got {args.max_seconds:g}")
    prompts = load_prompts(args.data_filename, None, args.local_files_only)
    random.Random(ORDER_SEED).shuffle(prompts)
    return prompts[: args.num_prompts]


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _base(args: argparse.Namespace) -> Settings:
    """By main.py's own rules; ValueError for what it would refuse."""
    words = ["--local_files_only"] if args.local_files_only else []
    for name in SHARED_FLAGS:
        if (value := getattr(args, name)) is not None:
            words.append(f"--{name}={value}")
    for seed in args.seeds:
        settings_of([*words, f"--seed={seed}"])
    return settings_of(words)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    default, size = Settings(), Size()
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    made.add_argument("--data_filename", required=True, metavar="FILE", help="as of main.py")
    made.add_argument("--num_prompts", type=int, metavar="N", help="of the shuffled file")
    made.add_argument("--max_seconds", type=float, metavar="S", help="then stop, start included")
    made.add_argument("--full_prompts", type=int, default=2, metavar="N", help="kept in OUT/full")
    made.add_argument("--no_pictures", dest="pictures", action="store_false")
    for name, kind in (("pool", int), ("block", int), ("fit_rows", int), ("timed_prompts", int),
                       ("side_prompts", int), ("self_pool", int),
                       ("chunk_prompts", int)):  # fmt: skip
        made.add_argument(f"--{name}", type=kind, default=getattr(size, name), metavar="N")
    for name, kind in (("alphas", float), ("seeds", int), ("self_alphas", float),
                       ("again_alphas", float)):  # fmt: skip
        made.add_argument(
            f"--{name}", type=kind, nargs="*", default=list(getattr(size, name)), metavar="X"
        )
    made.add_argument("--max_tokens", type=int, default=default.max_tokens)
    made.add_argument("--max_gen_tokens", type=int, default=1024)
    made.add_argument("--reward_cache", choices=("on", "off", "auto"), default="auto")
    made.add_argument("--llm_name", default=default.llm_name)
    made.add_argument("--reward_model_name", default=default.reward_model_name)
    made.add_argument("--model_dir", default=None)
    made.add_argument("--dtype", default=None)
    made.add_argument("--local_files_only", action="store_true")
    return made


if __name__ == "__main__":
    sys.exit(main())
