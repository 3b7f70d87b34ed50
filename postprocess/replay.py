"""Replays Speculative Rejection on logged Best-of-N runs: any rule, offline, in seconds.

The candidates of Speculative Rejection are members of Best-of-N's set, so a run made with
`--log_partial` holds what every rejection rule would have seen. The very code of
methods/speculative.py runs here on a decoder and a reward that only look up the log; tokens are
counted as the engine would, reading incrementally (the generator's tokens, where the reward model
has another tokenizer). Exact where a stop is a logged length; at other stops the longest logged
prefix stands in, and a line says so. Forks were never logged: `--refill` is refused. Flags are
main.py's; lists are tried in all combinations. Exit codes: 0 replayed; 1 no usable run; 2 nothing
to replay, or a bad command line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.plan import Plan, pages_for
from engine.schedule import Schedule
from methods.session import PromptFailed, Session
from methods.speculative import speculative_rejection
from postprocess.command import (
    EXIT_NOTHING,
    EXIT_OK,
    Nothing,
    Refused,
    guarded,
    parser,
    table,
    write_text,
)
from postprocess.logged import Logged, logged_of
from postprocess.pool import cost_at, curve, log_n_eq, sizes_up_to
from postprocess.reading import BadFile, count_of, shown
from postprocess.replaying import LoggedDecoder, LoggedReward
from postprocess.runs import load_runs
from rewards.value_head import BadValueHead, ValueHead, load_value_head
from suite.settings import Settings

EVERY_PAGE = 1 << 40  # where no memory is said, there is enough


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt under one rule."""

    json_idx: int
    score: float
    candidate: int
    z: float
    tokens_generated: int
    tokens_scored: int
    num_rounds: int
    num_approximated: int  # scores taken from a shorter prefix


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.refill:
        print(
            "error: --refill can't be replayed: forks are new texts, which no log holds; run "
            "main.py --speculative_rejection --refill",
            file=sys.stderr,
        )
        return EXIT_NOTHING
    return guarded(_work, args)


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--alpha", nargs="+", default=["0.5"], metavar="A", help="numbers or auto")
    made.add_argument("--schedule", nargs="+", default=["halving"], metavar="S")
    made.add_argument("--min_tokens", nargs="+", type=int, default=[0], metavar="T")
    made.add_argument(
        "--init_batch_size",
        nargs="+",
        type=int,
        default=[0],
        metavar="N",
        help="rows at the start (default: all that are logged)",
    )
    made.add_argument("--min_round_tokens", type=int, default=8, metavar="N")
    made.add_argument(
        "--value_head", nargs="+", default=["none"], metavar="FILE", help="files, or none"
    )
    made.add_argument(
        "--kv_tokens",
        type=int,
        default=None,
        metavar="N",
        help="answer tokens that the generator's cache holds (default: enough)",
    )
    made.add_argument("--page_size", type=int, default=None, metavar="N", help="default: the log's")
    made.add_argument(
        "--output", type=Path, default=None, metavar="FILE", help="one JSON line a prompt and rule"
    )
    made.add_argument("--refill", action="store_true", help=argparse.SUPPRESS)
    return made


def _work(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    rules = list(_rules(args))
    heads = {name: None if name == "none" else _head(name) for name in args.value_head}
    runs = [run for run in load_runs(args.places) if run.method.kind == "Bo"]
    logged = list(logged_of(runs, with_states=any(heads.values())))
    if not logged:
        raise Refused("no Best-of-N run has partial scores; --log_partial records them")
    results = {}
    for settings in rules:
        head = heads[settings.value_head or "none"]
        results[settings] = [replay(item, settings, head, args) for item in logged]
    if args.output:
        lines = [
            json.dumps({"rule": label(rule), **_plain(outcome)})
            for rule, outcomes in results.items()
            for outcome in outcomes
            if outcome
        ]
        write_text(args.output, "\n".join(lines) + "\n")
    seconds = time.perf_counter() - start
    print(report(logged, results))
    print(f"{len(rules)} rules on {len(logged)} pools in {seconds:.1f} s")
    return EXIT_OK


def _head(name: str) -> ValueHead:
    try:
        return load_value_head(name)
    except BadValueHead as error:
        raise Nothing(str(error)) from error


def _rules(args: argparse.Namespace) -> Any:
    """Settings of every combination."""
    lists = (args.alpha, args.schedule, args.min_tokens, args.init_batch_size, args.value_head)
    for alpha, schedule, floor, rows, head in itertools.product(*lists):
        try:
            rate = alpha if alpha == "auto" else float(alpha)
            if rate != "auto" and not 0 < rate < 1:
                raise ValueError(f"--alpha must be in (0, 1) or auto, got {alpha}")
            Schedule.parse(schedule, floor, args.min_round_tokens)
            if min(floor, rows, args.min_round_tokens - 1, args.page_size or 0) < 0:
                raise ValueError(
                    "--min_tokens, --init_batch_size and the like must not be negative"
                )
        except ValueError as error:
            raise Nothing(str(error)) from error
        yield Settings(
            speculative_rejection=True,
            alpha=rate,
            schedule=schedule,
            min_tokens=floor,
            min_round_tokens=args.min_round_tokens,
            init_batch_size=rows or None,
            value_head=None if head == "none" else head,
        )


def replay(
    logged: Logged, settings: Settings, head: ValueHead | None, args: argparse.Namespace
) -> Outcome | None:
    """One pool under one rule; None where no candidate has a score."""
    if head is not None:
        head.check(logged.run.reward, logged.states.hidden.shape[1] if logged.states else None)
    plan = _plan(logged, args)
    decoder = LoggedDecoder(logged, plan)
    reward = LoggedReward(logged)
    session = Session(
        settings=settings,
        parts=SimpleNamespace(decoder=decoder, reward=reward, plan=plan),  # type: ignore[arg-type]
        prompt="",
        prompt_ids=[],
        stream_key=0,
        max_length=decoder.max_length,
        progress=SimpleNamespace(update=lambda **_: None),  # type: ignore[arg-type]
        head=head,
    )
    try:
        speculative_rejection(session)
    except PromptFailed:
        return None
    best = max(session.completed, key=lambda c: (c.score, -c.index))
    return Outcome(
        json_idx=logged.json_idx,
        score=best.score,
        candidate=best.index,
        z=float(logged.pool.z(best.score)),
        tokens_generated=decoder.tokens_generated,
        tokens_scored=reward.tokens_read,
        num_rounds=len(session.rounds),
        num_approximated=reward.num_approximated,
    )


def _plan(logged: Logged, args: argparse.Namespace) -> Plan:
    """The log's plan with the memory that was asked for."""
    try:
        known = {k: v for k, v in logged.item["plan"].items() if k in Plan.__dataclass_fields__}
        plan = Plan(**known)
        page_size = args.page_size or plan.page_size
        bound = logged.item["max_tokens"] - logged.item["num_prompt_tokens"]
        for number in (page_size, plan.max_answer_tokens, bound):
            if not count_of(number):
                raise ValueError(f"want a count of tokens, got {shown(number)}")
        longest = pages_for(plan.max_answer_tokens, page_size)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise BadFile(f"prompt {logged.json_idx}: its plan can't be used ({error})") from error
    pages = EVERY_PAGE if args.kv_tokens is None else args.kv_tokens // page_size
    if pages < longest:
        raise Nothing(
            f"--kv_tokens {args.kv_tokens} holds no answer of {plan.max_answer_tokens} tokens; "
            f"give {longest * page_size} or more"
        )
    return replace(plan, pages=pages, page_size=page_size, max_rows=len(logged.score))


def label(settings: Settings) -> str:
    """A rule in a few words."""
    parts = [f"alpha {settings.alpha}", settings.schedule]
    if settings.min_tokens:
        parts.append(f"from {settings.min_tokens}")
    if settings.init_batch_size:
        parts.append(f"{settings.init_batch_size} rows")
    if settings.value_head:
        parts.append("value head")
    return ", ".join(parts)


def report(logged: Sequence[Logged], results: dict[Settings, list[Outcome | None]]) -> str:
    """Every rule against Best-of-n of the same pools at the same z."""
    pools = [item.pool for item in logged]
    reference = curve(pools, sizes_up_to(min(len(pool.scores) for pool in pools)))
    rows = []
    for n, z, log_n, tokens in reference:
        if n & (n - 1) == 0 or n == reference[-1][0]:
            n_eq = f"{np.exp(log_n):.1f}"
            rows.append((f"Best-of-{n}", f"{z:.3f}", n_eq, "", "", f"{tokens:.0f}", "1"))
    approximated = 0
    for rule, outcomes in results.items():
        found = [outcome for outcome in outcomes if outcome]
        if not found:
            rows.append((label(rule), "no candidate has a score", "", "", "", "", ""))
            continue
        approximated += sum(outcome.num_approximated for outcome in found)
        rows.append(_row(label(rule), found, [(t, z) for _, z, _, t in reference]))
    header = ("rule", "z", "N_eq", "generated", "scored", "tokens", "saving at equal z")
    text = table(header, rows)
    if approximated:
        text += f"\n{approximated} scores stand for longer prefixes: those stops were not logged"
    return text


def _row(name: str, outcomes: Sequence[Outcome], points: list[tuple[float, float]]) -> tuple:
    z = np.asarray([outcome.z for outcome in outcomes])
    generated = np.mean([outcome.tokens_generated for outcome in outcomes])
    scored = np.mean([outcome.tokens_scored for outcome in outcomes])
    equal = cost_at(points, float(z.mean()))
    saving = "-" if equal is None else f"{equal / (generated + scored):.2f}"
    n_eq = f"{np.exp(log_n_eq(z).mean()):.1f}"
    tokens = [f"{number:.0f}" for number in (generated, scored, generated + scored)]
    return (name, f"{z.mean():.3f}", n_eq, *tokens, saving)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}


if __name__ == "__main__":
    sys.exit(main())
