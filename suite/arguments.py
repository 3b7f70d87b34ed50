"""The command line of `main.py`: `parse(argv)` gives `Settings` or ends with exit code 2.

Every rule that needs no model is checked here, so a mistake costs a second and not a load. Nothing
heavy is imported (no torch, no transformers): `--help` stays instant. Flags of Speculative
Rejection are refused without it, never dropped silently. The one invariant: what `parse` returns
obeys every rule.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.schedule import Schedule
from suite.flags import add_flags
from suite.settings import Settings, settings_for_record

__all__ = ["Settings", "parse", "settings_for_record", "settings_of"]

NEEDS_REJECTION = (
    "alpha",
    "keep_fraction",
    "init_batch_size",
    "max_batch_size",
    "min_round_tokens",
    "refill",
    "refill_to",
    "value_head",
    "schedule",
    "min_tokens",
)


def parse(argv: Sequence[str] | None = None) -> Settings:
    """The settings of a command line; a mistake prints one message and exits with code 2."""
    try:
        return settings_of(sys.argv[1:] if argv is None else argv)
    except ValueError as e:
        _end(str(e))


def settings_of(words: Sequence[str]) -> Settings:
    """The same for other commands with flags of main.py: a mistake is a ValueError."""
    given = vars(_parser().parse_args(_tidy(words)))
    _refuse_without_effect(given)
    if (keep := given.get("keep_fraction")) is not None:
        given["alpha"] = min(round(1.0 - keep, 12), math.nextafter(1.0, 0.0))
    settings = Settings(**given)
    _check_together(settings)
    return settings


def _end(message: str) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # NOTE: a launcher ends all processes as soon as one exits. One message is enough, so
        # the others leave the machine's first process the time to print it.
        time.sleep(3)
        raise SystemExit(2)
    print(f"main.py: error: {message}", file=sys.stderr)
    print("main.py: all flags: python main.py --help", file=sys.stderr)
    raise SystemExit(2)


def _refuse_without_effect(given: dict[str, Any]) -> None:
    """Flags that would do nothing, or that contradict each other."""
    if "alpha" in given and "keep_fraction" in given:
        raise ValueError(
            f"--alpha {given['alpha']} and --keep_fraction {given['keep_fraction']} say the same "
            "thing (a round keeps 1 - alpha); give one of them"
        )
    if given.get("speculative_rejection"):
        if "log_partial" in given:
            raise ValueError(
                f"--log_partial {given['log_partial']} is for Best-of-N; the rounds of "
                "--speculative_rejection record their scores anyway, leave it out"
            )
        return
    for name in NEEDS_REJECTION:
        if name in given:
            value = "" if given[name] is True else f" {given[name]}"
            raise ValueError(
                f"--{name}{value} has an effect with --speculative_rejection only; "
                "add that flag, or leave this one out for Best-of-N"
            )


def _check_together(settings: Settings) -> None:
    first, most = settings.init_batch_size, settings.max_batch_size
    if first is not None and most is not None and first > most:
        raise ValueError(
            f"--init_batch_size must not exceed --max_batch_size, got {first} and {most}; "
            "raise the second or lower the first"
        )
    longest = min(settings.max_tokens, settings.max_gen_tokens)
    if settings.min_tokens >= longest:
        raise ValueError(
            f"--min_tokens must be less than the longest answer ({longest}), got "
            f"{settings.min_tokens}; no row is rejected before it has that length"
        )
    _check_stops(settings, longest)
    if settings.refill_to != 1.0 and not settings.refill:
        raise ValueError(
            f"--refill_to {settings.refill_to} has an effect with --refill only; add that flag, or "
            "leave this one out"
        )
    if settings.refill and settings.alpha == 0.0:
        raise ValueError(
            "--refill fills what a rejection frees, and --alpha 0 rejects nothing, got both; "
            "raise --alpha or leave --refill out"
        )
    function = re.fullmatch(r"[\w.]+:[\w.]+", settings.reward_model_name)
    if function or settings.self_reward:
        for name in ("log_hidden", "value_head"):
            if getattr(settings, name):
                raise ValueError(
                    f"--{name} reads a reward model's hidden states, which --reward_model_name "
                    f"{settings.reward_model_name} does not have; leave it out"
                )
    if settings.reward_timeout is not None and not function:
        raise ValueError(
            f"--reward_timeout {settings.reward_timeout} is for a reward given as module:function, "
            f"got --reward_model_name {settings.reward_model_name}; leave the timeout out"
        )


def _check_stops(settings: Settings, longest: int) -> None:
    """Schedules that never come to a stop, and what needs one where nothing is ever cut."""
    schedule = Schedule.parse(settings.schedule, settings.min_tokens, settings.min_round_tokens)
    first = schedule.next_stop(0, 0.5)
    if first is not None and first >= longest:
        raise ValueError(
            f"--schedule {settings.schedule} makes its first round at {first} tokens, and answers "
            f"end at {longest}; lower the first or raise --max_gen_tokens"
        )
    if settings.speculative_rejection and settings.alpha == 0.0:
        for name, usual in (("value_head", None), ("schedule", "memory"), ("min_tokens", 0)):
            if (value := getattr(settings, name)) != usual:
                raise ValueError(
                    f"--{name} {value} is about rejections, and --alpha 0 rejects nothing, got "
                    "both; raise --alpha or leave the other out"
                )
    lengths = settings.log_partial.split(",") if settings.log_partial else []
    if late := [length for length in lengths if int(length) >= longest]:
        raise ValueError(
            f"--log_partial {late[0]} is no unfinished text: answers end at {longest} tokens, with "
            "their final score; leave it out or raise --max_gen_tokens"
        )


class _Parser(argparse.ArgumentParser):
    """argparse whose error is one short line: the usage of 35 flags hides what went wrong."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(self._in_our_words(message) + self._suggestion(message))

    def _in_our_words(self, message: str) -> str:
        """argparse's own faults name no remedy; the rules of suite/flags.py do already."""
        parts = re.match(r"argument (--\w+): (.*)", message, re.DOTALL)
        if not parts or parts[2].startswith("--"):
            return parts[2] if parts else message
        flag, fault = parts[1], parts[2]
        action = self._option_string_actions[flag]
        if fault == "expected one argument":
            value = action.metavar or "|".join(action.choices)
            meaning = action.help.replace("%%", "%")
            return f"{flag} {fault}, got none; give {flag} {value}: {meaning}"
        if value := re.fullmatch(r"ignored explicit argument (.*)", fault, re.DOTALL):
            return f"{flag} takes no value, got {value[1][:80]}; leave the value out"
        return f"{flag}: {fault}"

    def _suggestion(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (--\w+)", message)
        near = unknown and difflib.get_close_matches(unknown[1], self._option_string_actions, 1)
        return f"; did you mean {near[0]}?" if near else ""


def _tidy(argv: Sequence[str]) -> list[str]:
    """`--batch-size` is `--batch_size`, and `--alpha -1e9` is a value, not another flag."""
    words: list[str] = []
    for word in argv:
        after_flag = bool(words) and re.fullmatch(r"--\w+", words[-1])
        if after_flag and re.fullmatch(r"-(\d.*|\.\d.*|inf\w*|nan)", word):
            words[-1] += "=" + word
        elif match := re.match(r"--[A-Za-z][A-Za-z0-9_-]*(?==|$)", word):
            words.append("--" + match[0][2:].replace("-", "_") + word[match.end() :])
        else:
            words.append(word)
    return words


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="main.py",
        usage="accelerate launch [its options] main.py [flags below]",
        description="Best-of-N and Speculative Rejection: many answers to each prompt, scored by "
        "a reward model, one JSON file a prompt. Without flags a small real model answers "
        "prompts/demo.json. Run the same command again to resume.",
        epilog="Example: accelerate launch main.py --speculative_rejection --alpha 0.5 --seed 0",
        argument_default=argparse.SUPPRESS,  # a flag that was not given is not in the result
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
    )
    add_flags(parser)
    return parser
