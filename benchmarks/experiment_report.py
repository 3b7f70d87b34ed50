"""The experiment's tables and pictures from its lines: Markdown ready for a README, OUT/report.md.

Only prompts that have the pool and every alpha of the first seed count; a prompt with further seeds
counts by their mean. Best-of-N and Speculative Rejection stand side by side in the two
accounts of experiment_accounts.py. Needs neither a GPU nor models. The last line of stdout is JSON.
Exit codes: 0 written; 1 no prompt is whole yet; 2 no archive.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.experiment_accounts import (
    ACCOUNTS,
    BestOfN,
    Gain,
    Searched,
    by_prompt,
    gain,
    interval_text,
    searched,
    tokens,
    whole,
)
from benchmarks.experiment_lines import SETTINGS, Archive
from benchmarks.experiment_plan import (
    PARTIAL,
    POOL,
    SELF_POOL,
    again_name,
    other_cache,
    rejection_name,
    self_name,
)
from postprocess.stats import bootstrap
from suite.files import NotWritten, write_whole

log = logging.getLogger(__name__)

METHOD_HEADER = ("method", "score", "95 %", "rows at the start", "completed", "tokens generated",
                 "tokens scored", "GPU-seconds, waves", "seconds, packed")  # fmt: skip
GAIN_HEADER = ("alpha", "score", "paper's account: GPU-seconds", "honest: seconds, packed",
               "honest: tokens")  # fmt: skip


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


class Report:
    """Text and numbers of one archive."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self.stored, self.size = archive, archive.settings(), archive.size()
        self.prompts = by_prompt(list(archive.done.values()))
        size = self.size
        self.other_pools = self._leave_out_other_pools({POOL: size.pool, SELF_POOL: size.self_pool})
        first = [rejection_name(alpha, size.seeds[0]) for alpha in size.alphas]
        self.main = whole(self.prompts, [POOL, *first])
        self.numbers: dict[str, Any] = {"num_prompts": len(self.main)}

    def _leave_out_other_pools(self, sizes: dict[str, int]) -> set[int]:
        """Prompts with a pool of another size than the settings tell of: one of the two was
        damaged."""
        other = [
            (idx, name)
            for idx, prompt in self.prompts.items()
            for name in sizes.keys() & prompt.keys()
            if len(prompt[name]["scores"]) + prompt[name]["num_failed_rows"] != sizes[name]
        ]
        for idx, name in other:
            del self.prompts[idx][name]
        if other:
            log.warning(
                "%s tells of other pools than %d lines hold (the first: prompt %d, %s); those are "
                "left out",
                self.archive.folder / SETTINGS,
                len(other),
                *other[0],
            )
        return {idx for idx, _ in other}

    def text(self) -> str:
        parts = [self.setting(), *self.main_tables()]
        parts += [self.again(), self.self_reward(), self.partial(), self.rounds()]
        return "\n\n".join(part for part in parts if part) + "\n"

    def setting(self) -> str:
        stored = self.stored
        sessions = self.archive.sessions()
        size = self.size
        lines = [
            f"{len(self.main)} prompts{self.left_out()}; {stored['llm_name']} rewarded by "
            f"{stored['reward_model_name']}, temperature {stored['temperature']:g}, top-k "
            f"{stored['top_k']}, answers up to {stored['max_gen_tokens']} tokens. Best-of-N out of "
            f"{size.pool:,} candidates a prompt, {size.block:,} of each process seed; Speculative "
            f"Rejection in the memory of {size.fit_rows} full-length rows"
            + (f" ({sessions[-1]['just_fit_bytes'] / 1e9:.3f} GB)" if sessions else "")
            + f", --reward_cache {stored['reward_cache']}.",
        ]
        if sessions:
            versions = ", ".join(f"{k} {v}" for k, v in sessions[-1]["versions"].items())
            total = sum(entry["seconds"] for entry in sessions)
            lines.append(
                f"{sessions[0]['date'][:10]} to {sessions[-1]['date'][:10]}, "
                f"{sessions[-1]['device']}; {versions}; {len(sessions)} calls, {total:.0f} s."
            )
        return "\n".join(lines)

    def left_out(self) -> str:
        """What is in the archive and not in the tables, beside prompts that are not whole yet."""
        counted = {prompt[POOL]["JSON_idx"] for prompt in self.main}
        failed = {idx for (idx, _), line in self.archive.done.items() if "failed" in line}
        pools = {idx for idx, prompt in self.prompts.items() if POOL in prompt}
        alike = {idx for idx in pools if not whole({idx: self.prompts[idx]}, [POOL])}
        parts = [
            f"{len(found - counted)} {what}"
            for found, what in (
                (failed, "that failed"),
                (alike, "whose pool scores all alike"),
                (self.other_pools, "whose pool has another size than the settings tell of"),
            )
            if found - counted
        ]
        return f" (left out: {', '.join(parts)})" if parts else ""

    def main_tables(self) -> list[str]:
        if not self.main:
            return []
        timing = [p for p in self.main if any(k.startswith("wave ") for k in p)]
        base = BestOfN(self.main, self.size, timing)
        methods = [
            searched(base, f"{alpha:g}", [rejection_name(alpha, seed) for seed in self.size.seeds])
            for alpha in self.size.alphas
        ]
        found = [{account: gain(base, m, account) for account in ACCOUNTS} for m in methods]
        self.base, self.methods = base, methods
        self._remember(base, methods, found)
        timed = "no prompt has been timed yet" if not timing else (
            f"seconds of Best-of-N measured on {len(timing)} prompts (two waves each), carried to "
            "the others by their pools' seconds"
        )  # fmt: skip
        note = (
            "Score: 100 is the pool's best, 1 a hundredth of its range. GPU-seconds, waves: "
            f"Best-of-N as {self.size.fit_rows} rows at a time, which is what the same memory "
            "holds and what the paper gave to a GPU; packed: the whole batch at once in all of the "
            f"GPU's memory; {timed}. Speculative Rejection has one figure for both."
        )
        head = "Speed-up over Best-of-N at equal score (95 % interval over prompts):"
        return [
            markdown(METHOD_HEADER, method_rows(base, methods)),
            note,
            head,
            markdown(GAIN_HEADER, gain_rows(methods, found)),
            verdict(methods, found),
        ]

    def _remember(
        self, base: BestOfN, methods: Sequence[Searched], found: Sequence[dict[str, Gain | None]]
    ) -> None:
        self.numbers["best_of_n"] = [
            {
                "n": n,
                "score": float(base.column(n).mean()),
                "interval": bootstrap(base.column(n)),
                "tokens": float(base.token_costs[:, base.sizes.index(n)].mean()),
                "paper_seconds": base.paper_seconds(n),
                "packed_seconds": base.packed_seconds(n),
            }
            for n in self.size.shown_sizes
            if n in base.sizes
        ]
        self.numbers["rejection"] = [
            {
                "alpha": float(m.name),
                "runs": m.num_runs,
                "score": float(m.scores.mean()),
                "interval": bootstrap(m.scores),
                "tokens": float(m.tokens.mean()),
                "seconds": float(m.seconds.mean()),
                **{
                    f"speedup_{a}": g[a] and [g[a].bound.sign, g[a].bound.value, g[a].interval]
                    for a in ACCOUNTS
                },
            }
            for m, g in zip(methods, found, strict=True)
        ]

    def again(self) -> str:
        """The reward model's cache one way and the other, on the prompts that have both."""
        size, parts = self.size, []
        cache = self.stored["reward_cache"]
        for alpha in size.again_alphas:
            names = [rejection_name(alpha, size.seeds[0]), again_name(alpha, cache)]
            if chosen := whole(self.prompts, [POOL, *names]):
                timing = [p for p in chosen if any(k.startswith("wave ") for k in p)]
                base = BestOfN(chosen, size, timing)
                ways = (cache, other_cache(cache))
                rows = [
                    searched(base, f"alpha {alpha:g}, reward cache {way}", [name])
                    for way, name in zip(ways, names, strict=True)
                ]
                found = [{account: gain(base, m, account) for account in ACCOUNTS} for m in rows]
                parts += [
                    f"The reward model's cache, {len(chosen)} prompts:",
                    markdown(METHOD_HEADER, method_rows(base, rows, [])),
                    markdown(GAIN_HEADER, gain_rows(rows, found)),
                ]
        return "\n\n".join(parts)

    def self_reward(self) -> str:
        size = self.size
        names = [SELF_POOL, *(self_name(alpha) for alpha in size.self_alphas)]
        chosen = whole(self.prompts, names) if size.self_alphas else []
        if not chosen:
            return ""
        base = BestOfN(chosen, size, pool=SELF_POOL)
        methods = [searched(base, f"{a:g}", [self_name(a)]) for a in size.self_alphas]
        perplexity = {name: -np.array([p[name]["best"]["score"] for p in chosen]) for name in names}
        rows = [
            [f"Best-of-{len(chosen[0][SELF_POOL]['scores'])}", "100.0", "-",
             f"{perplexity[SELF_POOL].mean():.3f}",
             f"{np.mean([tokens(p[SELF_POOL]) for p in chosen]):,.0f}", "1"]
        ]  # fmt: skip
        for method, name in zip(methods, names[1:], strict=True):
            rows.append(
                [f"alpha {method.name}", f"{method.scores.mean():.1f}",
                 interval_text(method.scores), f"{perplexity[name].mean():.3f}",
                 f"{method.tokens.mean():,.0f}", gain(base, method, "tokens") or "-"]
            )  # fmt: skip
        self.numbers["self_reward_prompts"] = len(chosen)
        header = ("method", "score", "95 %", "perplexity of the best", "tokens",
                  "speed-up in tokens")  # fmt: skip
        head = f"Self-reward (the generator's own perplexity), {len(chosen)} prompts:"
        return head + "\n\n" + markdown(header, rows)

    def partial(self) -> str:
        """Partial against final scores where nobody is cut, by length."""
        lines = [p[PARTIAL] for p in self.prompts.values() if PARTIAL in p]
        lengths = sorted({int(n) for line in lines for n in line["partials"]})
        rows = []
        for length in lengths:
            found = [line["partials"].get(str(length), [0, None])[1] for line in lines]
            values = np.array([value for value in found if value is not None])
            if len(values):
                both = bootstrap(values)
                spread = "-" if both is None else f"{both[0]:.2f} to {both[1]:.2f}"
                rows.append([length, len(values), f"{values.mean():.2f}", spread])
        if not rows:
            return ""
        head = (
            f"Rank correlation of the score of the first tokens with the final score, Best-of-"
            f"{self.size.fit_rows}, nobody cut:"
        )
        return head + "\n\n" + markdown(("tokens", "prompts", "correlation", "95 %"), rows)

    def rounds(self) -> str:
        """Rounds of the usual alpha on the first whole prompt."""
        if not self.main:
            return ""
        alpha = usual_alpha(self.size.alphas)
        name = rejection_name(alpha, self.size.seeds[0])
        line = self.main[0][name]
        rows = [
            [r["rows"], r["stop_length"], f"{r['kv_bytes'] / 1e9:.3f}",
             f"{r['reward_kv_bytes'] / 1e9:.3f}", f"{r['tokens_generated']:,}",
             f"{r['tokens_scored']:,}", r["kept"]]
            for r in line["rounds"]
        ]  # fmt: skip
        header = ("rows scored", "length", "KV, GB", "reward model's KV, GB", "tokens generated",
                  "tokens scored", "kept")  # fmt: skip
        head = f"One run, alpha {alpha:g}, prompt {line['JSON_idx']}, by round:"
        return head + "\n\n" + markdown(header, rows)


def gain_rows(
    methods: Sequence[Searched], found: Sequence[dict[str, Gain | None]]
) -> list[list[str]]:
    """Each method's speed-up over Best-of-N at its own score, in every account."""
    return [
        [m.name, f"{m.scores.mean():.1f}", *(str(g[a] or "-") for a in ACCOUNTS)]
        for m, g in zip(methods, found, strict=True)
    ]


def method_rows(
    base: BestOfN, methods: Sequence[Searched], shown: Sequence[int] | None = None
) -> list[list[str]]:
    """Best-of-N (all sizes, or those `shown`), then the methods."""
    rows = []
    for n in base.size.shown_sizes if shown is None else shown:
        if n not in base.sizes:
            continue
        share = n / np.array([len(p[base.pool]["scores"]) for p in base.prompts])
        generated, scored = (
            float(np.mean([p[base.pool][key] for p in base.prompts] * share))
            for key in ("tokens_generated", "tokens_scored")
        )
        times = [base.paper_seconds(n), base.packed_seconds(n)]
        rows.append(
            [f"Best-of-{n:,}", f"{base.column(n).mean():.1f}", interval_text(base.column(n)),
             f"{n:,}", f"{n:,}", f"{generated:,.0f}", f"{scored:,.0f}",
             *("-" if t is None else f"{t:.2f}" for t in times)]
        )  # fmt: skip
    for m in methods:
        name = m.name if m.name.startswith("alpha") else f"alpha {m.name}"
        spent = f"{m.seconds.mean():.2f}"
        rows.append(
            [name + (f", {m.num_runs} runs" if m.num_runs > len(m.scores) else ""),
             f"{m.scores.mean():.1f}", interval_text(m.scores), f"{m.start_rows:,.0f}",
             f"{m.completed:,.0f}", f"{m.generated.mean():,.0f}", f"{m.scored.mean():,.0f}",
             spent, spent]
        )  # fmt: skip
    return rows


def verdict(methods: Sequence[Searched], found: Sequence[dict[str, Gain | None]]) -> str:
    """Where early rejection pays, by the intervals alone."""
    names = {"paper": "the paper's account", "packed": "packed seconds", "tokens": "tokens"}
    lines = []
    for account in ACCOUNTS:
        known = [(m.name, g[account]) for m, g in zip(methods, found, strict=True) if g[account]]
        sure = [(name, g) for name, g in known if g.interval is not None]
        pays = [n for n, g in sure if g.bound.sign != "<=" and g.interval[0] > 1]
        loses = [n for n, g in sure if g.bound.sign != ">=" and g.interval[1] < 1]
        if sure:
            lines.append(
                f"- {names[account]}: the whole interval is above 1 (early rejection pays) at "
                f"alpha {', '.join(pays) or 'none'}; below 1 (it costs more) at "
                f"{', '.join(loses) or 'none'}"
            )
            lines += _beside(usual_alpha(m.name for m in methods), dict(known), names[account])
    return "\n".join(lines)


def usual_alpha(alphas: Iterable[Any]) -> Any:
    """The paper's usual 0.5, or what is nearest; as numbers or as names."""
    return min(alphas, key=lambda alpha: abs(float(alpha) - 0.5))


def _beside(usual: str, gains: dict[str, Gain], account: str) -> list[str]:
    """Which alphas gain less or more than the usual one, prompt by prompt."""
    if usual not in gains or len(gains) < 2:
        return []
    ratios = {n: g.beside(gains[usual]) for n, g in gains.items() if n != usual}
    less = [name for name, ratio in ratios.items() if ratio is not None and ratio[1] < 1]
    more = [name for name, ratio in ratios.items() if ratio is not None and ratio[0] > 1]
    return [
        f"- {account}, beside alpha {usual} on the same prompts (paired): surely less at "
        f"{', '.join(less) or 'none'}; surely more at {', '.join(more) or 'none'}"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("out", type=Path, metavar="OUT", help="as of experiment.py")
    made.add_argument("--no_pictures", dest="pictures", action="store_false")
    made.add_argument("--export", type=Path, metavar="FOLDER", help="write ordinary run folders")
    made.add_argument("--data_filename", metavar="FILE", help="the prompts; with --export")
    args = made.parse_args(argv)
    if args.export and not args.data_filename:
        made.error("--export needs --data_filename: the archive does not hold the prompts' texts")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if not (args.out / "settings.json").is_file():
        print(f"experiment_report.py: error: {args.out} is no experiment's folder", file=sys.stderr)
        return 2
    try:
        return _written(args)
    except (ValueError, OSError, NotWritten) as error:
        print(f"experiment_report.py: error: {error}", file=sys.stderr)
        return 2


def _written(args: argparse.Namespace) -> int:
    report = Report(Archive(args.out))
    text = report.text()
    write_whole(args.out / "report.md", text)
    print(text)
    if args.export and report.main:
        from benchmarks.experiment_export import export

        for folder in export(report, args.export, args.data_filename):
            print(folder)
    if args.pictures and report.main:
        from benchmarks.experiment_pictures import draw_all

        for path in draw_all(report, args.out):
            print(path)
    print(json.dumps(report.numbers, allow_nan=False))
    return 0 if report.main else 1


if __name__ == "__main__":
    sys.exit(main())
