"""Perplexity of the best answers under their generator, for the paper's self-reward table.

For each prompt the answer with the highest score, read once by the generator through our engine.
Three figures a run: the mean over prompts of exp(mean negative log-likelihood a token) of prompt
and answer, which is what self-reward maximises; the same of the answer alone given the prompt;
and the geometric mean of the latter, which one odd answer can't rule. Answers are encoded again
from their text. Writes results/perplexity_<pair>.csv.

Exit codes: 0 done; 1 a run or prompt was left out; 2 no runs, or no model.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.reading import shown
from postprocess.runs import (
    EXIT_OK,
    EXIT_WRONG,
    LOG,
    PROJECT,
    Nothing,
    Run,
    by_pair,
    guarded,
    load_runs,
    parser,
    table,
    write_text,
)
from postprocess.stats import bootstrap

if TYPE_CHECKING:
    from engine.model import Transformer
    from suite.chat import Chat

COLUMNS = ("run", "prompts", "tokens", "perplexity", "low", "high", "answer", "answer_geometric")


@dataclass(slots=True)
class Figures:
    """Per prompt: mean negative log-likelihood a token, with and without the prompt's tokens."""

    whole: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def row(self, name: str) -> list[object]:
        perplexities = np.exp(self.whole)
        low, high = bootstrap(perplexities) or (None, None)
        geometric = math.exp(float(np.mean(self.answer)))
        means = [float(perplexities.mean()), low, high, float(np.exp(self.answer).mean())]
        return [name, len(self.whole), self.num_tokens, *means, geometric]


def load_generator(name: str, model_dir: str | None, template: str) -> tuple[Transformer, Chat]:
    """The generator and its tokenizer, as main.py loads them."""
    from engine.weights import load_model
    from postprocess.reward_judge import device_and_dtype
    from suite.chat import generator_chat
    from suite.models import resolve

    try:
        source = resolve(name, model_dir, False, role="generator")
        folder = source.ready()
        device, dtype = device_and_dtype()
        model, _ = load_model(folder, dtype, device)
        return model, generator_chat(folder, source.name, template)
    except ValueError as error:
        raise Nothing(str(error)) from error


def answer_ids(chat: Chat, text: str) -> list[int]:
    """The answer as the generator wrote it: by itself, control tokens in it as text."""
    return list(
        chat.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    )


def read_prompt(model: Transformer, chat: Chat, prompt: str, answers: Sequence[str]) -> list[tuple]:
    """(negative log-likelihood of all, of the answer or None if empty, answer tokens) for each."""
    from engine.scoring import mean_log_likelihood

    prompt_ids = chat.prompt_ids(prompt)
    ids = [answer_ids(chat, text) for text in answers]
    longest = len(prompt_ids) + max(map(len, ids))
    if longest > model.config.max_positions:
        raise ValueError(f"{longest} tokens, the generator reads {model.config.max_positions}")
    means = mean_log_likelihood(model, prompt_ids, [[], *ids])
    # A mean is over every token but the first, which nothing predicts.
    before = len(prompt_ids) - 1
    own = means[0] * before
    found = []
    for mean, answer in zip(means[1:], ids, strict=True):
        alone = -(mean * (before + len(answer)) - own) / len(answer) if answer else None
        found.append((-mean, alone, len(answer)))
    return found


def evaluate(runs: Sequence[Run], model: Transformer, chat: Chat) -> tuple[dict[str, Figures], int]:
    """Figures by run, and how many answers were left out. A prompt is read once for all runs."""
    figures = {run.name: Figures() for run in runs}
    left_out = 0
    for idx in sorted(set().union(*(run.prompts.keys() for run in runs))):
        by_text: dict[str, list[Run]] = {}
        for run in runs:
            if idx in run.prompts and run.prompts[idx].prompt is not None:
                by_text.setdefault(run.prompts[idx].prompt or "", []).append(run)
        for prompt, having in by_text.items():
            answers = [run.prompts[idx].best.output for run in having]  # type: ignore[union-attr]
            try:
                found = read_prompt(model, chat, prompt, answers)
            except ValueError as error:
                LOG.warning("prompt %d left out: %s", idx, error)
                left_out += len(having)
                continue
            for run, (whole, alone, count) in zip(having, found, strict=True):
                if alone is None or not math.isfinite(whole) or not math.isfinite(alone):
                    LOG.warning(
                        "%s: prompt %d left out, its best answer is empty or has no likelihood",
                        run.name,
                        idx,
                    )
                    left_out += 1
                    continue
                figures[run.name].whole.append(whole)
                figures[run.name].answer.append(alone)
                figures[run.name].num_tokens += count
    return figures, left_out


def work(args: argparse.Namespace) -> int:
    code = EXIT_OK
    for pair, runs in by_pair(load_runs(args.places)).items():
        settings = next(iter(runs[0].prompts.values())).settings
        name = args.llm_name or settings.get("llm_name") or runs[0].llm
        model_dir = args.model_dir or settings.get("model_dir")
        template = settings.get("prompt_template") or "auto"
        model, chat = load_generator(name, model_dir, template)
        figures, left_out = evaluate(runs, model, chat)
        code = EXIT_WRONG if left_out else code
        rows = [found.row(name) for name, found in figures.items() if found.whole]
        if not rows:
            continue
        shown_rows = [
            ["-" if c is None else f"{c:.3f}" if isinstance(c, float) else c for c in row]
            for row in rows
        ]
        print(f"\n{pair}: perplexity of the best answers under {shown(name)}")
        print(table(COLUMNS, shown_rows))
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])
        path = args.out / f"perplexity_{pair}.csv"
        write_text(path, out.getvalue())
        print(path)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--llm_name", help="another model than the generator of the runs")
    made.add_argument("--model_dir", help="folder of the models (default: as the runs say)")
    made.add_argument(
        "--out", type=Path, default=PROJECT / "results", help="folder (default: results/)"
    )
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
