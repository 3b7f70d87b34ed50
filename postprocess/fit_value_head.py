"""Fits a value head: from the reward model's state at a prefix to the whole answer's score.

Reads Best-of-N runs made with `--log_partial 16,32,... --log_hidden`. For each logged length a
ridge regression maps (last hidden state, score) of the unfinished texts to their final score. Its
penalty, and whether it is fitted on scores as they are or on their distance from the prompt's mean,
are chosen by cross-validation over prompts: the highest mean rank correlation within a held-out
prompt, which is what a rejection uses. Writes one safetensors file for `main.py --value_head FILE`
and prints, for each length, the correlation of the score alone and of the head. Exit codes: 0
written; 1 the data does not suffice; 2 no runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import EXIT_OK, LOG, Refused, guarded, parser, table
from postprocess.logged import Logged, logged_of
from postprocess.runs import Run, load_runs
from postprocess.stats import spearman
from rewards.value_head import HEAD_SHA256, ValueHead, features

MIN_TEXTS = 50  # of one length; fewer are left out
MIN_TEXTS_A_PROMPT = 3
FOLDS = 5
PENALTIES = 10.0 ** np.arange(-3, 3.5, 0.5)  # times the number of texts; features have variance 1
SCORE_SCALE = 10.0  # the score itself is hardly penalised: a hundredth of a state's entry


@dataclass(slots=True)
class Texts:
    """The unfinished texts of one length: `x [n, hidden + 1]`, final scores, whose prompt."""

    x: np.ndarray
    y: np.ndarray
    prompt: np.ndarray  # [n] numbers from 0

    @property
    def num_prompts(self) -> int:
        return int(self.prompt.max()) + 1

    def centred(self) -> Texts:
        """Every prompt's mean taken off."""
        return Texts(self.x - self._means(self.x), self.y - self._means(self.y), self.prompt)

    def _means(self, values: np.ndarray) -> np.ndarray:
        sums = np.zeros((self.num_prompts, *values.shape[1:]))
        np.add.at(sums, self.prompt, values)
        counts = np.bincount(self.prompt).reshape(-1, *[1] * (values.ndim - 1))
        return (sums / counts)[self.prompt]


@dataclass(slots=True)
class Fitted:
    """One length's head and how it did on held-out prompts."""

    weights: np.ndarray
    bias: float
    within: bool
    penalty: float
    head_correlation: float
    score_correlation: float
    num_texts: int


def main(argv: Sequence[str] | None = None) -> int:
    args_parser = parser(__doc__)
    args_parser.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="FILE",
        help="the value head (default: value_head_<llm>_<reward>.safetensors)",
    )
    return guarded(_work, args_parser.parse_args(argv))


def _work(args: argparse.Namespace) -> int:
    runs = [run for run in load_runs(args.places) if run.method.kind == "Bo"]
    logged = list(logged_of(runs, with_states=True))
    if not logged:
        raise Refused("no run has partial scores and hidden states: --log_partial, --log_hidden")
    pairs = {item.run.pair for item in logged}
    if len(pairs) > 1:
        raise Refused(f"runs of several models, name one's folders: {', '.join(sorted(pairs))}")
    heads = {item.states.names.get(HEAD_SHA256) for item in logged if item.states} - {None}
    if len(heads) > 1:
        raise Refused("runs of reward models of one name with different weights: fit them apart")
    fitted = fit(gather(logged))
    if not fitted:
        raise Refused(f"no length has {MIN_TEXTS} unfinished texts of two prompts or more")
    run = logged[0].run
    head = ValueHead(
        lengths=np.asarray(list(fitted)),
        weights=np.stack([f.weights for f in fitted.values()]),
        bias=np.asarray([f.bias for f in fitted.values()]),
        provenance=provenance(run, logged, fitted) | ({HEAD_SHA256: heads.pop()} if heads else {}),
    )
    path = args.output or Path(f"value_head_{run.pair}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    head.save(path)
    print(report(fitted))
    print(f"written: {path}")
    return EXIT_OK


def gather(logged: Sequence[Logged]) -> dict[int, Texts]:
    """The unfinished texts by length; a prompt counts once whatever number of processes ran it."""
    prompts = {idx: n for n, idx in enumerate(sorted({item.json_idx for item in logged}))}
    parts: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = defaultdict(list)
    for item in logged:
        for length, scores in item.partial.items():
            usable = [i for i in scores if i in item.score and item.has_state(i, length)]
            if len(usable) < MIN_TEXTS_A_PROMPT:
                continue
            assert item.states is not None, "read with states"
            hidden = item.states.hidden[[item.place[i, length] for i in usable]]
            x = features(hidden, np.asarray([scores[i] for i in usable]))
            y = np.asarray([item.score[i] for i in usable], dtype=np.float64)
            parts[length].append((x, y, np.full(len(y), prompts[item.json_idx])))
    texts = {}
    for length in sorted(parts):
        x, y, prompt = (np.concatenate(column) for column in zip(*parts[length], strict=True))
        _, prompt = np.unique(prompt, return_inverse=True)
        if len(y) < MIN_TEXTS or prompt.max() < 1:
            LOG.warning("length %d: left out, only %d unfinished texts", length, len(y))
            continue
        texts[length] = Texts(x, y, prompt)
    return texts


def fit(texts: dict[int, Texts]) -> dict[int, Fitted]:
    return {length: _fit_length(t) for length, t in texts.items()}


def _fit_length(texts: Texts) -> Fitted:
    choices = []
    for within in (False, True):
        held_out = _cross_validate(texts, within)
        correlations = [_mean_spearman(column, texts) for column in held_out.T]
        best = int(np.argmax(correlations))
        choices.append((correlations[best], within, float(PENALTIES[best])))
    correlation, within, penalty = max(choices)
    weights = _ridge(texts, within, np.asarray([penalty]))[:, 0]
    bias = float(texts.y.mean() - texts.x.mean(axis=0) @ weights)
    alone = _mean_spearman(texts.x[:, -1], texts)
    return Fitted(weights, bias, within, penalty, correlation, alone, len(texts.y))


def _cross_validate(texts: Texts, within: bool) -> np.ndarray:
    """Predictions for every text by heads that have not seen its prompt, `[n, penalties]`."""
    folds = min(FOLDS, texts.num_prompts)
    predicted = np.zeros((len(texts.y), len(PENALTIES)))
    for fold in range(folds):
        test = texts.prompt % folds == fold
        _, numbers = np.unique(texts.prompt[~test], return_inverse=True)
        train = Texts(texts.x[~test], texts.y[~test], numbers)
        # The intercept does not matter for a rank within a prompt.
        predicted[test] = texts.x[test] @ _ridge(train, within, PENALTIES)
    return predicted


def _ridge(texts: Texts, within: bool, penalties: np.ndarray) -> np.ndarray:
    """Weights on the raw features for each penalty, `[features, penalties]`."""
    if within:
        texts = texts.centred()
    x, y = texts.x - texts.x.mean(axis=0), texts.y - texts.y.mean()
    scale = 1 / np.maximum(x.std(axis=0), 1e-6)
    scale[-1] *= SCORE_SCALE
    x = x * scale
    values, vectors = np.linalg.eigh(x.T @ x)
    along = vectors.T @ (x.T @ y)
    shrunk = along[:, None] / (np.maximum(values, 0)[:, None] + penalties * len(y))
    return scale[:, None] * (vectors @ shrunk)


def _mean_spearman(values: np.ndarray, texts: Texts) -> float:
    """Rank correlation with the final score within each prompt, averaged over prompts."""
    found = []
    for prompt in range(texts.num_prompts):
        mine = texts.prompt == prompt
        r = spearman(values[mine], texts.y[mine])
        if r is not None:
            found.append(r)
    return float(np.mean(found)) if found else 0.0


def provenance(run: Run, logged: Sequence[Logged], fitted: dict[int, Fitted]) -> dict[str, str]:
    """Where a head comes from, as strings for the file's metadata."""
    prompts = sorted({item.json_idx for item in logged})
    facts = {
        "llm_name": run.llm,
        "reward_model_name": run.reward,
        "target": "final score",
        "runs": sorted({item.run.folder.name for item in logged}),
        "num_prompts": len(prompts),
        "JSON_idx": prompts,
        "num_texts": [f.num_texts for f in fitted.values()],
        "penalties": [f.penalty for f in fitted.values()],
        "within_prompt": [f.within for f in fitted.values()],
        "held_out_rank_correlation": [round(f.head_correlation, 4) for f in fitted.values()],
        "rank_correlation_of_score": [round(f.score_correlation, 4) for f in fitted.values()],
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
    }
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()}


def report(fitted: dict[int, Fitted]) -> str:
    header = ("tokens", "texts", "score alone", "value head", "penalty", "fitted on")
    rows = [
        (
            length,
            f.num_texts,
            f"{f.score_correlation:.3f}",
            f"{f.head_correlation:.3f}",
            f"{f.penalty:g}",
            "distances from the prompt's mean" if f.within else "scores",
        )
        for length, f in fitted.items()
    ]
    return "rank correlation with the final score, held-out prompts\n" + table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
