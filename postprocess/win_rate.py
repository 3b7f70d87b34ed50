"""Win rates of win_rate/*_compare.json against *_ref.json with alpaca_eval, without its traps.

Checks first, so that no judge is paid for files that alpaca_eval would misread; then judges with
a cache of its own (win_rate/judge_cache/), one annotations folder a generator, and fails when a
judgement is missing. Judges:

  --judge openai                    the published GPT-4 judge; the key is read from OPENAI_API_KEY
  --judge_url URL --judge_model M   any OpenAI-compatible endpoint that gives log-probabilities
  --judge reward                    offline: a reward model scores both answers,
                                    preference = sigmoid(score difference)
  --judge scores                    offline: the same with the scores in the files, that is by
                                    the model that chose the answers

The last two say nothing that a GPT-4 win rate says, and are named for what they are. The
length-controlled rate needs df_gamed.csv (--df_gamed FILE, or the hub's cache, or a network); it
knows AlpacaEval's instructions by row number.

Exit codes: 0 done; 1 a check or the judge failed; 2 no files, or a bad command line.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess import judging, pictures
from postprocess.command import (
    EXIT_OK,
    EXIT_WRONG,
    LOG,
    PROJECT,
    Nothing,
    Refused,
    add_out,
    bare_parser,
    csv_text,
    guarded,
    table,
    write_text,
)
from postprocess.preflight import Rows, by_generator, faults, length_faults, load_rows
from postprocess.reading import BadFile, finite, shown

STABLE_LENGTH_CONTROLLED = 50
COLUMNS = (
    *("generator", "win_rate", "standard_error", "length_controlled_winrate", "lc_standard_error"),
    *("n_total", "n_wins", "n_wins_base", "n_draws", "discrete_win_rate", "avg_length"),
)


def plan_lengths(
    args: argparse.Namespace, compare: Rows, reference: Rows, folder: Path
) -> tuple[bool, Path | None]:
    """Whether to work out the length-controlled rate, and its hub cache; before any judging."""
    if args.metric == "raw":
        return False, None
    found = length_faults(compare, reference)
    cache = None
    if args.df_gamed is not None:
        cache = judging.hub_cache_of(args.df_gamed, folder)
    elif not found and (fault := judging.fetch_gamed(args.judge != "openai")):
        found.append(f"{fault}; --df_gamed FILE gives it")
    if found and args.metric == "lc":
        raise Refused(f"no length-controlled rate: {'; '.join(found)}")
    if found:
        LOG.warning("raw win rate only: %s", "; ".join(found))
        return False, None
    if len(reference) < STABLE_LENGTH_CONTROLLED:
        text = "%d instructions: the length-controlled rate is unstable below some 50"
        LOG.warning(text, len(reference))
    return True, cache


def preferences(
    compare: Rows, reference: Rows, scores: dict[tuple[str, str], float]
) -> dict[str, list[float]]:
    """1 + sigmoid(score of the method's answer - score of the reference's), in its order."""
    made = {}
    for name, rows in by_generator(compare).items():
        own = {row["instruction"]: scores[row["instruction"], row["output"]] for row in rows}
        base = {row["instruction"]: scores[row["instruction"], row["output"]] for row in reference}
        made[name] = [1 + sigmoid(own[text] - base[text]) for text in base]
    return made


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))


def stored_scores(rows: Rows) -> dict[tuple[str, str], float]:
    """The scores that stand in the files."""
    found = {}
    for row in rows:
        score = finite(row.get("score"))
        if score is None:
            raise Refused(f"--judge scores: an answer of {shown(row['generator'])} has no score")
        found[row["instruction"], row["output"]] = score
    return found


def make_job(args: argparse.Namespace, compare: Rows, reference: Rows) -> dict[str, Any]:
    """What differs between the judges: name, cache, preferences."""
    if args.judge == "scores":
        rewards = sorted({str(row["reward"]) for row in compare if row.get("reward")})
        made = preferences(compare, reference, stored_scores(compare + reference))
        return {"annotator": "-of-".join(["scores", *rewards[:1]]), "preferences": made}
    if args.judge == "reward":
        from postprocess.reward_judge import score_answers

        made = preferences(
            compare,
            reference,
            score_answers(compare + reference, args.reward_model_name, args.model_dir),
        )
        name = args.reward_model_name.rstrip("/").rpartition("/")[2]
        return {"annotator": f"reward-model-{name}", "preferences": made}
    model = args.judge_model or judging.OPENAI_MODEL
    url = args.judge_url or os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL")
    annotator = judging.OPENAI_ANNOTATOR if url is None else slug(model)
    mark = hashlib.sha256(f"{url}|{model}".encode()).hexdigest()[:8]
    cache = args.out / "judge_cache" / f"{slug(model)}_{mark}.json"
    if args.fresh:
        cache.unlink(missing_ok=True)
    cache.parent.mkdir(parents=True, exist_ok=True)
    return {
        "annotator": annotator,
        "cache": str(cache.resolve()),
        "judge_model": model,
        "judge_url": url,
    }


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.")[:80] or "judge"


def short_of(row: dict[str, Any], reference: Rows) -> str | None:
    """Names a generator for which the judge left prompts unjudged."""
    judged = int(row["n_total"])
    if judged == len(reference):
        return None
    counts = f"{judged} of {len(reference)} answers judged"
    return f"{row['generator']}: {counts}; the judge gave neither m nor M for the others"


def judge_pair(args: argparse.Namespace, compare_path: Path, reference_path: Path) -> int:
    compare, reference = load_rows(compare_path), load_rows(reference_path)
    if found := faults(compare, reference):
        raise Refused(f"{shown(compare_path.name)}: " + "; ".join(found))
    pair = compare_path.stem.removesuffix("_compare")
    fields = make_job(args, compare, reference)
    folder = args.out / f"{pair}_by_{slug(fields['annotator'])}"
    (folder / "leaderboard.csv").unlink(missing_ok=True)  # an earlier one must not pass for ours
    lengths, hub_cache = plan_lengths(args, compare, reference, folder)
    job = judging.Job(
        compare=str(compare_path.resolve()),
        reference=str(reference_path.resolve()),
        folder=str(folder.resolve()),
        length_controlled=lengths,
        **fields,
    )
    key = None if job.preferences else judge_key(args)
    rows = judging.run_job(job, key, hub_cache.resolve() if hub_cache else None)
    if {row["generator"] for row in rows} != set(by_generator(compare)):
        raise Refused(f"{shown(compare_path.name)}: the judge's metrics are of other generators")
    rows.sort(key=lambda row: -row["win_rate"] if row["win_rate"] is not None else math.inf)
    missing = [text for row in rows if (text := short_of(row, reference))]
    base = reference[0]["generator"]
    said: list[object] = [
        f"\n{pair}: win rates against {base}, {len(reference)} instructions, judge: {job.annotator}"
    ]
    header = ["generator", "win rate", "s.e.", "length-controlled", "s.e.", "n", "length"]
    said += [table(header, map(_line, rows))]
    if job.preferences:
        said += [
            "By a reward model: the share of a sigmoid of score differences, not a GPT-4 win rate."
        ]
    if missing:
        print(*said, sep="\n")
        raise Refused("; ".join(missing) + f"; nothing was written to {folder / 'leaderboard.csv'}")
    write_text(
        folder / "leaderboard.csv",
        csv_text(COLUMNS, [[row.get(key) for key in COLUMNS] for row in rows]),
    )
    said += [folder / "leaderboard.csv", *draw(rows, base, pair, job.annotator, args)]
    print(*said, sep="\n")  # last: a pipe that closes early costs no file
    return EXIT_OK


def judge_key(args: argparse.Namespace) -> str | None:
    """The judge's key from the environment: an argument would show in the process list."""
    key = os.environ.get(args.judge_key_env)
    elsewhere = os.environ.get("OPENAI_API_KEYS") or os.environ.get("OPENAI_CLIENT_CONFIG_PATH")
    if key or (args.judge_url is None and elsewhere):
        return key or None
    if args.judge_url is not None:
        return "none"  # local endpoints want some key
    raise Nothing(
        f"no judge: set {args.judge_key_env}, or give --judge_url URL --judge_model NAME, or judge"
        " offline with --judge reward or --judge scores"
    )


def _line(row: dict[str, Any]) -> list[str]:
    keys = ("win_rate", "standard_error", "length_controlled_winrate", "lc_standard_error")
    rates = ["-" if row.get(key) is None else f"{row[key]:.2f}" for key in keys]
    return [row["generator"], *rates, f"{row['n_total']:.0f}", f"{row['avg_length']:.0f}"]


def draw(rows: Rows, base: str, pair: str, judge: str, args: argparse.Namespace) -> list[Path]:
    """A bar a generator with one standard error each side, length-controlled beside raw."""
    plt = pictures.start(args.show)
    kinds = [("win_rate", "standard_error", "raw")]
    if all(row.get("length_controlled_winrate") is not None for row in rows):
        kinds.append(("length_controlled_winrate", "lc_standard_error", "length-controlled"))
    figure, ax = plt.subplots(figsize=(7, 1.3 + 0.34 * len(rows) * len(kinds)))
    height = 0.8 / len(kinds)
    for index, (rate, error, label) in enumerate(kinds):
        places = [row + (index - (len(kinds) - 1) / 2) * height for row in range(len(rows))]
        errors = [row[error] or 0 for row in rows]
        values = [row[rate] for row in rows]
        color = pictures.CYCLE[index]
        ax.barh(
            places,
            values,
            height * 0.9,
            xerr=errors,
            label=label,
            color=color,
            alpha=0.85,
            capsize=2,
        )
        for place, value, extra in zip(places, values, errors, strict=True):
            ax.text(value + extra + 1, place, f"{value:.1f}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [row["generator"] for row in rows])
    ax.invert_yaxis()
    ax.axvline(50, color="black", linewidth=0.8, linestyle=":")
    ax.set_xlim(0, max(100, *(row["win_rate"] + (row["standard_error"] or 0) + 8 for row in rows)))
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(
        f"win rate against {base}, % (± one standard error, n = {rows[0]['n_total']:.0f})"
    )
    ax.set_title(args.title or f"{pair.replace('_', ' with ')}\njudge: {judge}", fontsize=10)
    if len(kinds) > 1:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False)
    return pictures.save(figure, args.imgs, f"win_rate_{pair}_by_{slug(judge)}", args.show)


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None


def find_pairs(args: argparse.Namespace) -> list[tuple[Path, Path]]:
    """The named files, or every compare file of win_rate/ with its reference."""
    if args.compare is not None:
        reference = args.reference
        if reference is None:
            reference = args.compare.with_name(
                f"{args.compare.stem.removesuffix('_compare')}_ref.json"
            )
        pairs = [(args.compare, reference)]
    else:
        found = sorted(args.out.glob("*_compare.json")) if args.out.is_dir() else []
        pairs = [
            (path, path.with_name(f"{path.stem.removesuffix('_compare')}_ref.json"))
            for path in found
        ]
    if not pairs:
        raise Nothing(f"no *_compare.json in {shown(args.out)}: merge_json.py writes them")
    for path in [path for pair in pairs for path in pair]:
        if not path.is_file():
            raise Nothing(f"no file {shown(path)}")
    return pairs


def work(args: argparse.Namespace) -> int:
    code = EXIT_OK
    pairs = find_pairs(args)
    for compare, reference in pairs:
        try:
            judge_pair(args, compare, reference)
        except (Refused, BadFile) as error:
            LOG.error("%s", error)
            code = EXIT_WRONG
    return code


def main(argv: Sequence[str] | None = None) -> int:
    made = bare_parser(__doc__)
    made.add_argument("--compare", type=Path, help="answers to judge (default: all in win_rate/)")
    made.add_argument(
        "--reference", type=Path, help="the reference's answers (default: beside them)"
    )
    made.add_argument("--judge", choices=["openai", "reward", "scores"], default="openai")
    made.add_argument("--judge_url", help="address of an OpenAI-compatible endpoint, with its /v1")
    made.add_argument("--judge_model", help="the model's name there")
    made.add_argument(
        "--judge_key_env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key"
    )
    made.add_argument("--fresh", action="store_true", help="forget this judge's earlier judgements")
    made.add_argument(
        "--reward_model_name", default="SmolLM2-135M-Reward", help="for --judge reward"
    )
    made.add_argument("--model_dir", help="folder of the models, for --judge reward")
    made.add_argument(
        "--metric",
        choices=["auto", "lc", "raw"],
        default="auto",
        help="auto: length-controlled where possible",
    )
    made.add_argument("--df_gamed", type=Path, metavar="FILE", help="df_gamed.csv of alpaca_eval")
    add_out(made, "win_rate")
    made.add_argument(
        "--imgs", type=Path, default=PROJECT / "imgs", help="pictures (default: imgs/)"
    )
    made.add_argument("--title", help="of the picture")
    made.add_argument("--show", action="store_true", help="open a window as well")
    args = made.parse_args(argv)
    if args.judge_url is not None and not (_is_address(args.judge_url) and args.judge_model):
        made.error("--judge_url wants http(s)://host/v1 without a key, and --judge_model NAME")
    if args.judge != "openai" and (args.judge_url or args.judge_model):
        made.error("--judge_url and --judge_model do not go with --judge reward or scores")
    return guarded(work, args)


if __name__ == "__main__":
    sys.exit(main())
