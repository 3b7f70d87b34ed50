"""Whole runs of both methods with random weights: seconds by phase, rounds, predicted memory.

    python benchmarks/bench_run.py --shape llama-3-8b --prompt 128 --runs "--batch_size 120" \
        "--speculative_rejection" "--speculative_rejection --reward_cache off"

Each run is a set of main.py's flags. The models are built once; answers never stop by themselves
(--ignore_stop), so every run is the worst case in length. Texts mean nothing: speed and memory
only. A run is done --repeats times more: the first records the decode graphs (capture_sec) and
compiles what reads. With --text the generator has SmolLM2's tokenizer and the reward one that is
trained on the spot, so every score goes through text. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shapes import SHAPES, random_model
from engine.plan import DoesNotFit
from generator import Generator
from rewards.heads import LinearHead
from rewards.loading import RewardModel
from suite import arguments, assembly, backend
from suite.chat import Chat, Format, load_tokenizer
from suite.models import resolve
from suite.progress import Progress
from suite.prompts import Prompt
from suite.run_plan import check_budget
from suite.settings import Settings

# Flags of main.py that are about files, models or records: a run here has none of them.
NO_EFFECT = (
    *("data_filename", "output_folder", "num_prompts", "parallel", "pretty_print_output"),
    *("llm_name", "reward_model_name", "model_dir", "local_files_only", "dtype"),
    *("prompt_template", "reward_timeout", "value_head", "log_hidden", "record_memory"),
)
SMOLLM2_VOCAB = SHAPES["smollm2-135m"].vocab_size


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


class TextChat(Chat):
    """SmolLM2's tokenizer; a prompt is cut to as many tokens as were asked for."""

    def __init__(self, num_tokens: int) -> None:
        tokenizer = load_tokenizer(resolve("SmolLM2-135M-Instruct").ready())
        super().__init__(tokenizer, Format("", "", ""), [tokenizer.eos_token_id])
        self.num_tokens = num_tokens

    def prompt_ids(self, prompt: str) -> list[int]:
        return super().prompt_ids(prompt)[: self.num_tokens]


def another_chat(generator: Chat, vocab: int) -> Chat:
    """For the reward: a byte-level BPE trained on texts of random ids, as they will be scored."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    ids = torch.randint(0, len(generator.tokenizer), (2000, 64), generator=torch.Generator())
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        generator.decode(ids.tolist()), vocab, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>")
    return Chat(tokenizer, Format("", "<|end|>", "<|end|>"))


class _Parser(argparse.ArgumentParser):
    """One line an error; nothing is built before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench_run.py: error: {' '.join(message.split())}\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, `settings` of each run included. A mistake ends in exit code 2."""
    parser = _Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--reward_shape", choices=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--text", action="store_true", help="two tokenizers instead of ids")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=1, help="after a first run that records")
    parser.add_argument("--runs", nargs="*", required=True, help="flags of main.py, one run each")
    known = {*parser._option_string_actions}
    args = parser.parse_args(_runs_apart(sys.argv[1:] if argv is None else argv, known))
    args.runs = [flags.strip() for flags in args.runs]
    try:
        args.device = checked_device(args.device)
        _check_sizes(args)
        args.settings = [settings_of(flags) for flags in args.runs]
        for flags, settings in zip(args.runs, args.settings, strict=True):
            _check_run(flags, settings, args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _runs_apart(argv: Sequence[str], known: set[str]) -> list[str]:
    """A run of one flag looks like a flag of this command: a blank before it says that it isn't."""
    words: list[str] = []
    for word in argv:
        flag = word.startswith("-") and word.split("=")[0] not in known
        words.append(f" {word}" if flag and "--runs" in words else word)
    return words


def checked_device(name: str) -> torch.device:
    """Raises ValueError for a device that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu or cuda, got {name!r}; leave it out") from error
    there = device.type == "cpu" or (
        device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    )
    if not there:
        raise ValueError(
            f"--device must be cpu or one of {torch.cuda.device_count()} GPUs here, got {name!r}; "
            "leave it out"
        )
    return device


def _check_sizes(args: argparse.Namespace) -> None:
    for name, least in (("prompt", 1), ("repeats", 0)):
        if (value := getattr(args, name)) < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}; raise it")
    if not args.runs:
        raise ValueError("--runs needs flags of main.py, quoted, one text a run, got none")
    if args.text and SHAPES[args.shape].vocab_size < SMOLLM2_VOCAB:
        raise ValueError(
            f"--text needs a --shape with {SMOLLM2_VOCAB} tokens or more, got {args.shape}"
        )


def settings_of(flags: str) -> Settings:
    """A run's settings by main.py's own rules. Raises ValueError with its message."""
    try:
        words = shlex.split(flags)
        if not words:
            raise ValueError("holds no flag; --batch_size 20 is what main.py does without any")
        with redirect_stdout(io.StringIO()):
            settings = arguments.settings_of([*words, "--ignore_stop"])
    except ValueError as error:
        raise ValueError(f"--runs {flags!r}: {error}") from error  # a quotation that is open, too
    except SystemExit as end:
        asked = "asks for main.py's help; leave that out"
        raise ValueError(f"--runs {flags!r}: {asked}") from end
    default = Settings()
    for name in NO_EFFECT:
        if (value := getattr(settings, name)) != getattr(default, name):
            given = f"--{name}" + ("" if value is True else f" {value}")
            raise ValueError(
                f"--runs {flags!r}: {given} is about files or models that a run here does not "
                "have; leave it out"
            )
    return settings


def _check_run(flags: str, settings: Settings, args: argparse.Namespace) -> None:
    """What can be told by the shapes alone: the prompt's place and the budget."""
    shapes = [SHAPES[args.shape], SHAPES[args.reward_shape or args.shape]]
    bound = min(settings.max_tokens, *(shape.max_positions for shape in shapes))
    if args.prompt >= bound:
        raise ValueError(
            f"--prompt must be less than the {bound} tokens of prompt and answer in --runs "
            f"{flags!r}, got {args.prompt}; lower it, or raise --max_tokens where the shape can"
        )
    try:
        check_budget(settings, shapes[0], dtype_on(args.device), args.device)
    except ValueError as error:
        raise ValueError(f"--runs {flags!r}: {error}") from error


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def one_run(
    flags: str, settings: Settings, args: argparse.Namespace, model, judge: RewardModel
) -> dict:
    """Run a prompt with these flags; what the JSON object records, in short."""
    device = model.device
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if args.text:
        chat = TextChat(args.prompt)
        judge.chat = another_chat(chat, min(32000, judge.backbone.config.vocab_size))
    else:
        chat = judge.chat = IdChat(args.prompt, model.config.vocab_size)
    parts = assembly.put_together(settings, chat, model, judge)
    processes = SimpleNamespace(rank=0, world_size=1, is_main=True, device=device)
    generator = Generator(settings, processes, parts)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    text = "one more word " * (args.prompt // 3 + 1)  # read where there are tokenizers
    prompt = Prompt(0, text, {"JSON_idx": 0, "prompt": text})
    with Progress(1, 0, False) as progress:
        results = [measured(generator, prompt, progress) for _ in range(args.repeats + 1)]
    result, last = results[-1]
    phases: dict[str, float] = {}
    for name, sec in result["clock"]:
        phases[name] = phases.get(name, 0.0) + sec
    plan = result["plan"]
    stops = [[r["rows"], r["stop_length"], share(r, plan), r["tokens_scored"]]
             for r in result["rounds"]]  # fmt: skip
    return {
        "flags": flags,
        **last,
        "first": results[0][1],
        "phases": phases,
        "kept_reward_cache": plan["keep_reward_cache"],
        "why": plan["why"],
        "rounds": stops,  # rows, stop length, share of the KV budget in use, tokens read
        "recorded_steps": plan["recorded_steps"],
        "recording_sec": plan["recording_sec"],
        "predicted_peak_bytes": plan["predicted_peak_bytes"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "splits": result["out_of_memory_splits"],
    }


def share(stop: dict, plan: dict) -> float:
    """How much of the KV budget was in use at a stop, by both models' caches."""
    return round((stop["kv_bytes"] + stop["reward_kv_bytes"]) / plan["budget_bytes"], 3)


def measured(generator: Generator, prompt: Prompt, progress: Progress) -> tuple[dict, dict]:
    """A run's object, and what is told of every run, the first one too."""
    reward = generator.parts.reward
    result = generator.run(prompt, progress)
    # What the run is longer by: answers are decoded at its end, and some texts were waited for.
    at_end = sum(sec for name, sec in result["clock"] if name == "text: decode")
    return result, {
        "elapsed_sec": result["elapsed_sec"],
        "capture_sec": result["capture_sec"],
        "text_sec": at_end + getattr(reward, "text_sec", 0.0),
        "text_wait_sec": at_end + getattr(reward, "text_wait_sec", 0.0),
        "tokens_generated": result["tokens_generated"],
        "tokens_scored": result["tokens_scored"],
    }


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device, dtype = args.device, dtype_on(args.device)
    model = random_model(args.shape, dtype, device)
    backbone = random_model(args.reward_shape or args.shape, dtype, device, seed=1)
    weight = torch.randn(1, backbone.config.hidden_size, device=device)
    rows = []
    for flags, settings in zip(args.runs, args.settings, strict=True):
        judge = RewardModel(backbone, LinearHead(weight), None)
        try:
            row = one_run(flags, settings, args, model, judge)
        except DoesNotFit as error:  # seen only beside both models
            print(f"bench_run.py: error: --runs {flags!r}: {error}", file=sys.stderr)
            return 2
        rows.append(row)
        ratio = row["peak_memory_bytes"] / row["predicted_peak_bytes"]
        first = row["first"]
        print(f"{flags}\n  {row['elapsed_sec']:.2f} s (first {first['elapsed_sec']:.2f}, of it "
              f"{first['capture_sec']:.2f} recording, at most {row['recorded_steps']} steps in "
              f"{row['recording_sec']:.2f} s planned; then {row['capture_sec']:.2f}), "
              f"{row['tokens_generated']} generated, {row['tokens_scored']} read, peak "
              f"{row['peak_memory_bytes'] / 1e9:.2f} GB = {ratio:.3f} of the prediction, "
              f"reward cache {'kept' if row['kept_reward_cache'] else 'not kept'} "
              f"({row['why']})", flush=True)  # fmt: skip
        print(f"  text {row['text_sec']:.3f} s, {row['text_wait_sec'] / row['elapsed_sec']:.1%} of "
              f"the run waited for it ({row['text_wait_sec']:.3f} s)")  # fmt: skip
        print("  " + ", ".join(f"{name} {sec:.3f} s" for name, sec in row["phases"].items()))
        print("  rounds [rows, length, share, read]: " + json.dumps(row["rounds"]), flush=True)
    print(json.dumps({"shape": args.shape, "device": backend.device_name(device), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
