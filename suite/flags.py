"""The flags of `main.py` by heading: name, rule of its value, help.

The message for a bad value is the rule, the value and the remedy, in one line. Defaults are not
here but in `Settings`; the help texts take them from there. Nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from suite.settings import Settings

LARGEST_SIZE = 2**31 - 1  # token positions and row numbers are 32 bit on the device
LARGEST_SEED = 2**62  # leaves room for the process numbers that are added
LARGEST_AMOUNT = 1e6  # GB or seconds: more is a slip of the keyboard
COLDEST = 1e-5  # a smaller temperature overflows float32 and is greedy in all but name


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags, under their headings."""
    _add_run_flags(parser)
    _add_model_flags(parser)
    _add_sampling_flags(parser)
    _add_rejection_flags(parser)
    _add_memory_flags(parser)


def _integer(name: str, low: int, high: int, remedy: str) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,25}", text) else None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"--{name} must be an integer from {low} to {high}, got {_short(text)}; {remedy}"
            )
        return value

    return convert


def _number(
    name: str, allowed: Callable[[float], bool], rule: str, remedy: str
) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not allowed(value):
            raise argparse.ArgumentTypeError(
                f"--{name} must be {rule}, got {_short(text)}; {remedy}"
            )
        return value + 0.0  # -0.0 becomes 0.0

    return convert


def _alpha(text: str) -> float | str:
    if text == "auto":
        return text
    remedy = "0.5 rejects the worse half each round"
    return _number("alpha", lambda x: 0 <= x < 1, "in [0, 1) or auto", remedy)(text)


def _text(name: str, what: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not text.strip() or "\0" in text or len(text) > 4096:
            raise argparse.ArgumentTypeError(
                f"--{name} must be {what} (not blank, without NUL, at most 4096 characters), "
                f"got {_short(text)}; see --help"
            )
        return text

    return convert


def _model_name(name: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        _text(name, "a model's name, a hub id or a folder")(text)
        if not re.search(r"[A-Za-z0-9]", text.rstrip("/").rsplit("/", 1)[-1]):
            raise argparse.ArgumentTypeError(
                f"--{name} must end in a model's name, since it names the files, "
                f"got {_short(text)}; give the folder's own name instead of . or .."
            )
        return text

    return convert


def _schedule(text: str) -> str:
    if text in ("memory", "halving") or re.fullmatch(r"fixed:[1-9][0-9]{0,8}", text):
        return text
    raise argparse.ArgumentTypeError(
        f"--schedule must be memory, halving or fixed:K, got {_short(text)}; "
        "fixed:64 scores and rejects every 64 tokens"
    )


def _lengths(text: str) -> str:
    """`16,32,64`: ascending, each once."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8}){0,63}", text):
        raise argparse.ArgumentTypeError(
            f"--log_partial must be lengths in tokens with commas between, got {_short(text)}; "
            "for instance 16,32,64,128,256"
        )
    return ",".join(map(str, sorted({int(part) for part in text.split(",")})))


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


class _Group:
    """Adds flags of one heading; every help text ends with the flag's default."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def flag(self, name: str, text: str, **options: Any) -> None:
        default = getattr(Settings(), name)
        if default is not None and options.get("action") != "store_true":
            text = f"{text} (default {default})"
        self._group.add_argument(f"--{name}", help=text.replace("%", "%%"), **options)

    def switch(self, name: str, text: str) -> None:
        self.flag(name, text, action="store_true")

    def choice(self, name: str, choices: tuple[str, ...], text: str) -> None:
        self.flag(name, text, choices=choices)

    def size(self, name: str, low: int, remedy: str, text: str) -> None:
        self.flag(name, text, type=_integer(name, low, LARGEST_SIZE, remedy), metavar="N")

    def number(
        self, name: str, allowed: Callable[[float], bool], rule: str, remedy: str, text: str
    ) -> None:
        self.flag(name, text, type=_number(name, allowed, rule, remedy), metavar="X")

    def path(self, name: str, what: str, text: str) -> None:
        self.flag(name, text, type=_text(name, what), metavar="PATH")


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    run = _Group(parser, "run")
    run.path(
        "data_filename",
        "a file of prompts or a data set's id",
        "JSON list or JSONL of {JSON_idx, prompt}, or a data set id for datasets.load_dataset",
    )
    run.path(
        "output_folder",
        "a folder",
        "where the JSON files go; default archive/<method>_<llm>_<reward>_<seed>",
    )
    run.size("num_prompts", 1, "leave it out for all", "only the first N prompts of the file")
    run.choice(
        "parallel",
        ("candidates", "prompts"),
        "several processes: each makes its own candidates of every prompt, or each takes its "
        "share of the prompts",
    )
    run.flag(
        "seed",
        "process r draws from seed + r",
        type=_integer("seed", 0, LARGEST_SEED, "another seed gives other answers"),
        metavar="N",
    )
    run.switch("pretty_print_output", "indent the JSON files")
    run.switch("record_memory", "record the GPU's allocations for torch's memory viewer")
    run.switch("save_token_ids", "also store the token ids of every answer")


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    models = _Group(parser, "models")
    models.flag(
        "llm_name",
        "the generator: a known name, a hub id or a folder",
        type=_model_name("llm_name"),
        metavar="NAME",
    )
    models.flag(
        "reward_model_name",
        "the reward model, likewise; the same as --llm_name for self-reward; or module:function, "
        "a Python function",
        type=_model_name("reward_model_name"),
        metavar="NAME",
    )
    models.path("model_dir", "a folder", "look for both models inside this folder")
    models.switch("local_files_only", "never download; use what is on this machine")
    models.choice(
        "dtype",
        ("bfloat16", "float16", "float32"),
        "of weights and arithmetic; default bfloat16 on a GPU, float32 on a CPU",
    )
    models.choice(
        "prompt_template",
        ("auto", "chat", "plain", "alpaca"),
        "how a prompt becomes tokens: the tokenizer's chat template, BOS + prompt, or the Alpaca "
        "instruction format; auto goes by the model",
    )
    models.number(
        "reward_timeout",
        lambda x: 0 < x <= LARGEST_AMOUNT,
        f"above 0 and at most {LARGEST_AMOUNT:.0f} seconds",
        "leave it out to wait without bound",
        "a module:function that takes more seconds than this fails the prompt",
    )


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    sampling = _Group(parser, "sampling")
    sampling.size(
        "batch_size",
        1,
        "it is N of Best-of-N on each process",
        "Best-of-N: candidates on each process",
    )
    sampling.size(
        "max_tokens",
        2,
        "it bounds prompt and answer together",
        "longest prompt and answer together; longer prompts are skipped",
    )
    sampling.size(
        "max_gen_tokens",
        1,
        "it bounds the answer alone",
        "longest answer; the smaller of both bounds holds",
    )
    sampling.flag(
        "top_k",
        "sample among the K likeliest tokens; 0 or -1 is off",
        type=_integer("top_k", -1, LARGEST_SIZE, "0 or -1 is off"),
        metavar="K",
    )
    sampling.number(
        "top_p",
        lambda x: 0 <= x <= 1,
        "in [0, 1]",
        "1 is off",
        "sample among the likeliest tokens that hold this much probability; 1 is off",
    )
    sampling.number(
        "temperature",
        lambda x: x == 0 or x >= COLDEST,
        f"0 or at least {COLDEST:g}, and finite",
        "0 is greedy, 1 samples from the model's own distribution",
        "0 is greedy",
    )
    sampling.switch("ignore_stop", "benchmarks: every answer runs to the longest length")


def _add_rejection_flags(parser: argparse.ArgumentParser) -> None:
    rejection = _Group(parser, "speculative rejection")
    rejection.switch("speculative_rejection", "drop the worst unfinished answers as memory fills")
    rejection.flag(
        "alpha",
        "rejection rate: a round keeps the best 1 - A; a number in [0, 1), or auto",
        type=_alpha,
        metavar="A",
    )
    rejection.number(
        "keep_fraction",
        lambda x: 0 < x <= 1,
        "in (0, 1]",
        "0.5 keeps the better half each round",
        "the same the other way round: a round keeps the best X",
    )
    rejection.size(
        "init_batch_size",
        1,
        "leave it out for what fits",
        "rows at the start; default: as many as memory holds",
    )
    rejection.size("max_batch_size", 1, "leave it out for no bound", "most rows at the start")
    rejection.size(
        "min_round_tokens",
        1,
        "8 is the default",
        "each round drops enough for the rest to grow by this many tokens",
    )
    rejection.switch(
        "refill", "fill freed memory with forks of the survivors: another method, named SpRF"
    )
    rejection.number(
        "refill_to",
        lambda x: 0 < x <= 1,
        "in (0, 1]",
        "1 fills up to as many rows as before the rejection, 0.7 lets them taper",
        "each refill makes the rows X times what they were before the round",
    )
    rejection.path(
        "value_head", "a safetensors file", "rank unfinished answers by this head, not their score"
    )
    rejection.flag(
        "schedule",
        "when to reject: memory (as it fills), halving, or fixed:K (every K tokens)",
        type=_schedule,
        metavar="S",
    )
    rejection.size("min_tokens", 0, "0 is off", "no rejection before answers are this long")


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    memory = _Group(parser, "memory and speed")
    memory.number(
        "gpu_memory_utilization",
        lambda x: 0 < x <= 1,
        "in (0, 1]",
        "0.9 leaves a tenth to others",
        "share of the GPU's memory that the run may use",
    )
    memory.number(
        "kv_cache_gb",
        lambda x: 0 < x <= LARGEST_AMOUNT,
        f"above 0 and at most {LARGEST_AMOUNT:.0f}",
        "leave it out to use what is free",
        "memory for keys and values by hand, in GB; default: from free memory",
    )
    memory.choice(
        "reward_cache",
        ("auto", "on", "off"),
        "keep the reward model's keys and values between rounds",
    )
    memory.switch(
        "log_hidden",
        "store the reward model's hidden state of every scored text beside the JSON file, for "
        "postprocess/fit_value_head.py",
    )
    memory.flag(
        "log_partial",
        "Best-of-N: also score the first L tokens of every answer, for postprocess/replay.py",
        type=_lengths,
        metavar="L,L,...",
    )
