"""The experiment as ordinary run folders, for all of postprocess/: plots, win rates, best answers.

Best-of-n is the pool's first n candidates as one process packed them (its seconds as in the packed
account; sizes that were not timed are left out), Speculative Rejection one folder a seed. Only a
winner has its text; the others have their score. Nothing is invented: what lines do not hold is
left out of the objects.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.experiment_accounts import BestOfN, Prompt, seconds
from benchmarks.experiment_plan import POOL, rejection_name
from suite.prompts import load_prompts
from suite.records import RunFolder
from suite.settings import Settings, output_folder, settings_for_record

if TYPE_CHECKING:
    from benchmarks.experiment_report import Report
    from suite.prompts import Prompt as Asked


def export(report: Report, target: Path, data_filename: str) -> list[Path]:
    """The folders written, for the prompts that count."""
    prompts = load_prompts(data_filename)
    report.archive.check_prompts(prompts)
    asked = {prompt.json_idx: prompt for prompt in prompts}
    if missing := sorted({prompt[POOL]["JSON_idx"] for prompt in report.main} - set(asked)):
        raise ValueError(
            f"--data_filename {data_filename} has no prompt with JSON_idx "
            f"{', '.join(map(str, missing[:5]))}; give the file that the experiment had"
        )
    stored = report.stored
    names = {field.name for field in dataclasses.fields(Settings)}
    kept = {key: value for key, value in stored.items() if key in names - {"seed"}}
    base = Settings(**kept | {"data_filename": data_filename})
    sessions = report.archive.sessions()
    just_fit = sessions[-1]["just_fit_bytes"] if sessions else None
    done = []
    for n in report.size.shown_sizes:
        if report.base.packed_seconds(n) is not None:
            settings = dataclasses.replace(base, batch_size=n, speculative_rejection=False)
            done.append(_write(settings, target, report, asked, _best_of(report.base, n)))
    for alpha in report.size.alphas:
        for seed in report.size.seeds:
            name = rejection_name(alpha, seed)
            if any(name in prompt for prompt in report.main):
                settings = dataclasses.replace(
                    base,
                    speculative_rejection=True,
                    alpha=alpha,
                    seed=seed,
                    kv_cache_gb=just_fit / 1e9 if just_fit else None,
                )
                done.append(_write(settings, target, report, asked, _rejection(name)))
    return done


def _write(
    settings: Settings, target: Path, report: Report, asked: dict[int, Asked], object_of: Any
) -> Path:
    folder = target / output_folder(settings, 1).name
    with RunFolder(folder, settings, 1) as run:
        run.open()
        for prompt in report.main:
            idx = prompt[POOL]["JSON_idx"]
            made = object_of(prompt)
            if made is not None:
                head = {
                    **settings_for_record(settings),
                    "process_seed": settings.seed,
                    "process_rank": 0,
                    "num_processes": 1,
                    "prompt": asked[idx].record,
                }
                run.write(asked[idx], [head | made])
    return folder


def _best_of(base: BestOfN, n: int) -> Any:
    mean = base.packed_seconds(n)
    assert mean is not None

    def made(prompt: Prompt) -> dict[str, Any]:
        line = prompt[POOL]
        share = n / len(line["scores"])
        sec = mean * seconds(line) / base.pool_seconds
        generating = line["generation_sec"] / seconds(line)
        texts = {entry["place"]: entry["output"] for entry in line["winners"]}
        winner = max(place for place in texts if place < n)
        rows = [
            {"output": texts[i] if i == winner else "", "score": score, "candidate": i,
             "num_tokens": line["num_tokens"][i]}
            for i, score in enumerate(line["scores"][:n])
        ]  # fmt: skip
        costs = {
            "tokens_generated": sum(line["num_tokens"][:n]),
            "tokens_scored": round(line["tokens_scored"] * share),
        }
        return _object(rows, sec * generating, sec * (1 - generating), costs)

    return made


def _rejection(name: str) -> Any:
    def made(prompt: Prompt) -> dict[str, Any] | None:
        line = prompt.get(name)
        if line is None:
            return None
        best = line["best"]
        others = list(line["scores"])
        others.remove(round(best["score"], 4))
        rows = [{"output": best["output"], "score": best["score"]}]
        rows += [{"output": "", "score": score} for score in others]
        costs = {key: line[key] for key in ("tokens_generated", "tokens_scored")}
        return _object(rows, line["generation_sec"], line["reward_sec"], costs)

    return made


def _object(
    rows: list[dict[str, Any]], generating: float, scoring: float, costs: dict[str, int]
) -> dict[str, Any]:
    return {
        "elapsed_sec": generating + scoring,
        "clock": [["generation", generating], ["reward", scoring]],
        "trajectories": rows,
        **costs,
    }
