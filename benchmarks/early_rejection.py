"""What early rejection saves: every addition alone and together, against Best-of-N, on real models.

One process loads the models once and runs, for each prompt, a pool of Best-of-N candidates and each
configuration. The best reward of a configuration is measured in the pool: z (standard deviations
above the pool's mean) and N_eq = 1/(1 - Phi(z)). Costs are tokens generated plus tokens that the
reward model read, and seconds of generation and scoring. The best answers are also judged by what
was not optimised: length and perplexity under the generator. Results go to OUT/results.jsonl, one
line a prompt and configuration; run the same command again to resume. `--log` makes the pool a run
folder with partial scores and hidden states, OUT/pool, for postprocess/fit_value_head.py and
postprocess/replay.py. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.early_summary import summarise
from postprocess.pool import Pool, log_n_eq, sizes_up_to
from suite.files import json_lines
from suite.settings import Settings

POOL = "pool"
LENGTHS = "16,32,64,128,256"
# Speculative Rejection as in the paper (by memory), then each addition alone, then together.
CONFIGS = (
    "rows=256 alpha=0.5",
    "rows=256 alpha=0.5 schedule=halving min_tokens=16",
    "rows=256 alpha=0.5 schedule=halving min_tokens=16 head",
    "rows=256 alpha=auto schedule=halving min_tokens=16",
    "rows=64 alpha=0.5 schedule=halving min_tokens=16 refill",
    "rows=64 alpha=0.5 schedule=halving min_tokens=16 refill head",
    "rows=64 alpha=auto schedule=halving min_tokens=16 refill head",
)


@dataclass(frozen=True, slots=True)
class Config:
    """One way to search, written as `rows=64 alpha=0.5 schedule=halving refill head`."""

    name: str
    settings: Settings
    uses_head: bool

    @classmethod
    def parse(cls, text: str, base: Settings) -> Config:
        """Raises ValueError where the text says something that Speculative Rejection has not."""
        changes: dict[str, Any] = {}
        words = text.split()
        for word in words:
            key, _, value = word.partition("=")
            if key in ("refill", "head"):
                changes |= {"refill": True} if key == "refill" else {}
            elif key in ("rows", "min_tokens", "min_round_tokens") and value.isdigit():
                changes["init_batch_size" if key == "rows" else key] = int(value)
            elif key == "alpha" and value:
                changes[key] = value if value == "auto" else float(value)
            elif key == "to" and value:
                changes["refill_to"] = float(value)
            elif key == "schedule" and value:
                changes[key] = value
            else:
                raise ValueError(f"--config {text!r}: {word!r} is not known")
        if "init_batch_size" not in changes:
            raise ValueError(f"--config {text!r}: rows=N is missing")
        settings = replace(base, speculative_rejection=True, **changes)
        return cls(" ".join(words), settings, "head" in words)


class Experiment:
    """The loaded models, the results so far, and what is still to be run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base = Settings(
            data_filename=args.data_filename,
            model_dir=args.model_dir,
            llm_name=args.llm_name,
            reward_model_name=args.reward_model_name,
            max_tokens=args.max_tokens,
            max_gen_tokens=args.max_gen_tokens,
            batch_size=args.pool,
            seed=args.seed,
            dtype=args.dtype,
            kv_cache_gb=args.kv_cache_gb,
            local_files_only=args.local_files_only,
            save_token_ids=True,
            output_folder=str(args.out / "pool"),
            log_partial=args.lengths if args.log else None,
            log_hidden=args.log,
        )
        self.configs = [Config.parse(text, self.plain) for text in args.config or CONFIGS]
        self.results = args.out / "results.jsonl"
        self.done = {(line["JSON_idx"], line["config"]): line for line in json_lines(self.results)}
        self.parts: Any = None
        self.head: Any = None

    @property
    def plain(self) -> Settings:
        """Settings of a run that logs nothing."""
        return replace(self.base, log_partial=None, log_hidden=False)

    def load(self) -> None:
        """Both models, with memory for the pool and for every configuration."""
        from rewards.value_head import load_value_head
        from suite.assembly import assemble
        from suite.settings import base_name

        rows = max([self.args.pool, *(c.settings.init_batch_size or 0 for c in self.configs)])
        rows = min(rows, self.args.max_rows or rows)
        plan_for = replace(
            self.plain, speculative_rejection=True, max_batch_size=rows, reward_cache="on"
        )
        if any(config.uses_head for config in self.configs):
            if not self.args.value_head:
                raise ValueError("a --config with head needs --value_head FILE")
            self.head = load_value_head(self.args.value_head)
            self.head.check(base_name(self.base.reward_model_name), None)
        self.processes = _one_process()
        self.parts = assemble(plan_for, self.processes)
        if self.head:
            name, reward = base_name(self.base.reward_model_name), self.parts.reward
            self.head.check(name, reward.hidden_size, reward.head_sha256)

    def missing(self, json_idx: int) -> list[str]:
        names = [POOL, *(config.name for config in self.configs)]
        return [name for name in names if (json_idx, name) not in self.done]

    def run_prompt(self, prompt: Any, *, keep: bool = True) -> None:
        """Everything that is missing of a prompt; `keep` is False for a rehearsal."""
        lines: list[dict[str, Any]] = []
        answers: list[np.ndarray] = []
        pool_line = self.done.get((prompt.json_idx, POOL))
        if pool_line is None:
            item = self._run(self.base, prompt, None, store=keep and self.args.log)
            pool_line = _pool_line(prompt.json_idx, item, self.args.log)
            lines.append(pool_line)
            answers.append(_best_ids(item))
        for config in self.configs:
            if (prompt.json_idx, config.name) in self.done:
                continue
            item = self._run(config.settings, prompt, self.head if config.uses_head else None)
            lines.append(_config_line(prompt.json_idx, config.name, item, pool_line))
            answers.append(_best_ids(item))
        for line, value in zip(lines, self._perplexities(prompt, answers), strict=True):
            line["best_perplexity"] = value
        if keep:
            with self.results.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            self.done |= {(line["JSON_idx"], line["config"]): line for line in lines}

    def _run(
        self, settings: Settings, prompt: Any, head: Any, store: bool = False
    ) -> dict[str, Any]:
        from generator import Generator, PromptFailed
        from suite.progress import Progress
        from suite.records import RunFolder

        generator = Generator(settings, self.processes, self.parts, head)
        item = generator.run(prompt, Progress(1, speaks=False))
        if "skipped" in item:
            raise PromptFailed(item["skipped"])
        if store:
            plain = [{k: v for k, v in t.items() if k != "token_ids"} for t in item["trajectories"]]
            with RunFolder(Path(settings.output_folder or ""), settings, 1) as folder:
                folder.open()
                folder.write(prompt, [{**item, "trajectories": plain}])
        return item

    def _perplexities(self, prompt: Any, answers: Sequence[np.ndarray]) -> list[float]:
        """Under the generator, prompt and answer, as in self-reward."""
        from engine.scoring import mean_log_likelihood

        if not answers:
            return []
        ids = self.parts.chat.prompt_ids(prompt.prompt)
        decoder = self.parts.decoder
        means = mean_log_likelihood(decoder.model, ids, answers, decoder.ops)
        return [float(np.exp(-value)) for value in means]


def _one_process() -> Any:
    import torch

    from suite.processes import Processes

    return Processes(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _best(item: dict[str, Any]) -> dict[str, Any]:
    return max(item["trajectories"], key=lambda t: (t["score"], -t["candidate"]))


def _best_ids(item: dict[str, Any]) -> np.ndarray:
    best = _best(item)
    ids = np.asarray(best["token_ids"], dtype=np.int64)
    return ids[:-1] if best["finish_reason"] == "stop" else ids


def _costs(item: dict[str, Any]) -> dict[str, Any]:
    def seconds(prefix: str) -> float:
        return sum(s for phase, s in item["clock"] if phase.startswith(prefix))

    return {
        "tokens_generated": item["tokens_generated"],
        "tokens_scored": item["tokens_scored"],
        "generation_sec": seconds("generation"),
        "reward_sec": seconds("reward"),
        "num_completed": len(item["trajectories"]),
        "num_rounds": len(item["rounds"]),
        "best_score": _best(item)["score"],
        "best_tokens": _best(item)["num_tokens"],
    }


def _pool_line(json_idx: int, item: dict[str, Any], logged: bool) -> dict[str, Any]:
    """The pool's moments and its Best-of-n for every n, exact over subsets."""
    scores = np.asarray([t["score"] for t in item["trajectories"]])
    generated = np.asarray([t["num_tokens"] for t in item["trajectories"]])
    pool = Pool(scores, generated, generated)
    sizes = sizes_up_to(len(scores))
    return {
        "JSON_idx": json_idx,
        "config": POOL,
        "mean": float(scores.mean()),
        "std": float(scores.std()),
        "n": len(scores),
        "mean_tokens": float(generated.mean()),
        "best_of": {str(n): pool.best_of(n) for n in sizes},
        "logged": logged,  # partial scores cost reading: its seconds are not Best-of-N's
        **_costs(item),
    }


def _config_line(
    json_idx: int, name: str, item: dict[str, Any], pool: dict[str, Any]
) -> dict[str, Any]:
    costs = _costs(item)
    z = (costs["best_score"] - pool["mean"]) / (pool["std"] or 1.0)
    return {
        "JSON_idx": json_idx,
        "config": name,
        "z": z,
        "log_n_eq": float(log_n_eq(z)),
        "num_forks": sum(r.get("forks", 0) for r in item["rounds"]),
        **costs,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from suite.prompts import load_prompts

    try:
        args.out.mkdir(parents=True, exist_ok=True)
        experiment = Experiment(args)
        prompts = load_prompts(args.data_filename, args.num_prompts, args.local_files_only)
        todo = [prompt for prompt in prompts if experiment.missing(prompt.json_idx)]
        if todo:
            experiment.load()
            _run_all(experiment, todo, args)
    except (ValueError, OSError) as error:
        print(f"early_rejection.py: error: {error}", file=sys.stderr)
        return 2
    names = [POOL, *(config.name for config in experiment.configs)]
    text, numbers = summarise(list(experiment.done.values()), names)
    print(text)
    print(json.dumps(numbers, allow_nan=False))
    return 0


def _run_all(experiment: Experiment, todo: Sequence[Any], args: argparse.Namespace) -> None:
    from methods.session import PromptFailed

    start = time.perf_counter()
    if args.rehearse:
        experiment.run_prompt(todo[0], keep=False)  # kernels compile, graphs are recorded
    for number, prompt in enumerate(todo):
        spent = time.perf_counter() - start
        a_prompt = spent / number if number else 0.0
        if number and args.max_seconds and spent + a_prompt > args.max_seconds:
            print(f"{number} of {len(todo)} prompts in {spent:.0f} s; run again to go on")
            return
        try:
            experiment.run_prompt(prompt)
        except PromptFailed as error:
            print(f"prompt {prompt.json_idx}: left out, {error}")
        print(f"prompt {prompt.json_idx}: {time.perf_counter() - start - spent:.2f} s", flush=True)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    default = Settings()
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    made.add_argument("--data_filename", required=True, metavar="FILE", help="as of main.py")
    made.add_argument("--num_prompts", type=int, default=None, metavar="N")
    made.add_argument("--max_seconds", type=float, default=None, metavar="S", help="then stop")
    made.add_argument("--pool", type=int, default=256, metavar="N", help="Best-of-N candidates")
    made.add_argument(
        "--max_rows",
        type=int,
        default=None,
        metavar="N",
        help="as if memory held no more rows: Best-of-N then runs in waves",
    )
    made.add_argument(
        "--config",
        action="append",
        default=None,
        metavar="TEXT",
        help="a configuration; may be given often (default: the seven of CONFIGS)",
    )
    made.add_argument("--value_head", default=None, metavar="FILE")
    made.add_argument("--log", action="store_true", help="log the pool: OUT/pool")
    made.add_argument("--lengths", default=LENGTHS, metavar="L,L", help="with --log")
    made.add_argument("--no_rehearsal", dest="rehearse", action="store_false")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--max_tokens", type=int, default=default.max_tokens)
    made.add_argument("--max_gen_tokens", type=int, default=384)
    made.add_argument("--llm_name", default=default.llm_name)
    made.add_argument("--reward_model_name", default=default.reward_model_name)
    made.add_argument("--model_dir", default=None)
    made.add_argument("--dtype", default=None)
    made.add_argument("--kv_cache_gb", type=float, default=None)
    made.add_argument("--local_files_only", action="store_true")
    return made


if __name__ == "__main__":
    sys.exit(main())
