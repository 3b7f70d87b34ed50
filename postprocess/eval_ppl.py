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
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import (
    EXIT_OK,
    EXIT_WRONG,
    LOG,
    Nothing,
    add_out,
    csv_text,
    guarded,
    parser,
    table,
    write_text,
)
from postprocess.reading import shown
from postprocess.runs import Run, by_pair, load_runs
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


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer read by the generator, or why it could not be."""

    whole: float  # negative log-likelihood a token, prompt and answer
    answer: float  # the answer's tokens alone
    num_tokens: int
    fault: str | None = None


def read_prompt(
    model: Transformer, chat: Chat, prompt: str, answers: Sequence[str]
) -> list[Reading]:
    """One reading for each answer; the prompt is computed once."""
    from engine.scoring import mean_log_likelihood

    prompt_ids = chat.prompt_ids(prompt)
    limit = model.config.max_positions - len(prompt_ids)
    if limit < 1:
        fault = f"the prompt has {len(prompt_ids)} tokens, as many as the generator reads"
        return [Reading(math.nan, math.nan, 0, fault)] * len(answers)
    ids = [answer_ids(chat, text) for text in answers]
    fitting = [own if len(own) <= limit else [] for own in ids]
    means = mean_log_likelihood(model, prompt_ids, [[], *fitting])
    # A mean is over every token but the first, which nothing predicts.
    before = len(prompt_ids) - 1
    return [
        _reading(mean, means[0] * before, before, len(own), limit)
        for mean, own in zip(means[1:], ids, strict=True)
    ]


def _reading(mean: float, prompt_sum: float, before: int, count: int, limit: int) -> Reading:
    if count == 0:
        return Reading(math.nan, math.nan, 0, "the answer is empty")
    if count > limit:
        return Reading(math.nan, math.nan, count, f"{count} tokens, there is room for {limit}")
    alone = (mean * (before + count) - prompt_sum) / count
    fault = None if math.isfinite(mean) and math.isfinite(alone) else "no finite likelihood"
    return Reading(-mean, -alone, count, fault)


def evaluate(runs: Sequence[Run], model: Transformer, chat: Chat) -> tuple[list[Figures], int]:
    """Figures of each run, and how many answers were left out."""
    figures = [Figures() for _ in runs]
    left_out = 0
    for idx in sorted(set().union(*(run.prompts.keys() for run in runs))):
        by_text: dict[str, list[int]] = {}
        for place, run in enumerate(runs):
            if idx in run.prompts and (text := run.prompts[idx].prompt) is not None:
                by_text.setdefault(text, []).append(place)
        for prompt, places in by_text.items():
            best = [runs[place].prompts[idx].best for place in places]
            answers = [answer.output for answer in best if answer is not None]
            for place, found in zip(places, read_prompt(model, chat, prompt, answers), strict=True):
                if found.fault is not None:
                    LOG.warning("%s: prompt %d left out, %s", runs[place].name, idx, found.fault)
                    left_out += 1
                    continue
                figures[place].whole.append(found.whole)
                figures[place].answer.append(found.answer)
                figures[place].num_tokens += found.num_tokens
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
        rows = [f.row(run.name) for run, f in zip(runs, figures, strict=True) if f.whole]
        if not rows:
            continue
        shown_rows = [
            ["-" if c is None else f"{c:.3f}" if isinstance(c, float) else c for c in row]
            for row in rows
        ]
        path = args.out / f"perplexity_{pair}.csv"
        write_text(path, csv_text(COLUMNS, rows))
        print(f"\n{pair}: perplexity of the best answers under {shown(name)}")
        print(table(COLUMNS, shown_rows))
        print(path)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--llm_name", help="another model than the generator of the runs")
    made.add_argument("--model_dir", help="folder of the models (default: as the runs say)")
    add_out(made, "results")
    return guarded(work, made.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
