"""Best-of-N runs that logged partial scores (`--log_partial`), and hidden states if they did.

One `Logged` is one process's object of one prompt. What is missing or does not fit together is a
`BadFile` with the file's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from postprocess.command import LOG
from postprocess.pool import Pool
from postprocess.reading import MAX_SCORE, BadFile, count_of, finite, load_objects, shown
from postprocess.rounds import partials_of
from postprocess.runs import Run
from suite.hidden import BadStates, States, read_states, states_path

LONGEST_TOKENS = 1 << 24  # beyond any model's
FIXED = ("prompt", "end")  # what the reward model reads beside the answers


@dataclass(slots=True)
class Logged:
    """Candidates by index; `partial[length][index]` are scores of the first `length` tokens."""

    json_idx: int
    run: Run
    item: dict[str, Any]  # the object as it was read
    num_tokens: dict[int, int]
    stopped: dict[int, bool]
    score: dict[int, float]
    partial: dict[int, dict[int, float]]
    states: States | None = None
    place: dict[tuple[int, int], int] = field(default_factory=dict)  # (index, length) in states

    @property
    def lengths(self) -> list[int]:
        return sorted(self.partial)

    @property
    def prompt_tokens(self) -> int:
        return self.item["reward_prompt_tokens"]

    @property
    def end_tokens(self) -> int:
        return self.item["reward_end_tokens"]

    def answer_tokens(self, index: int) -> int:
        """Without the stop token: what the reward model reads of the whole answer."""
        return self.num_tokens[index] - self.stopped[index]

    def has_state(self, index: int, length: int) -> bool:
        """Whether the log holds hidden states of finite numbers there."""
        if (place := self.place.get((index, length))) is None or self.states is None:
            return False
        return bool(np.isfinite(self.states.hidden[place]).all())

    @property
    def pool(self) -> Pool:
        indices = list(self.score)
        read = [self.answer_tokens(i) + self.end_tokens for i in indices]
        return Pool(
            scores=np.asarray([self.score[i] for i in indices]),
            generated=np.asarray([self.num_tokens[i] for i in indices]),
            scored=np.asarray(read) * bool(self.prompt_tokens),
            prompt_tokens=self.prompt_tokens,
        )


def logged_of(runs: Sequence[Run], *, with_states: bool) -> Iterator[Logged]:
    """Every object of the runs that has partial scores; what can't be used is a warning."""
    for run in runs:
        for idx, result in run.prompts.items():
            for number, item in enumerate(load_objects(result.path)):
                try:
                    yield _logged(run, idx, result.path, number, item, with_states)
                except (BadFile, BadStates) as error:
                    LOG.warning("%s: left out, %s", shown(run.folder.name), error)


def _check(item: dict[str, Any], made: Logged) -> None:
    """Counts that are counts, scores that are numbers, each candidate once."""
    if any(count_of(item[f"reward_{name}_tokens"]) is None for name in FIXED):
        raise ValueError("reward_prompt_tokens is no count")
    if len(made.score) < len(item["trajectories"]):
        raise ValueError("a candidate stands twice")
    for index, number in made.num_tokens.items():
        if count_of(number) is None or not 1 <= number <= LONGEST_TOKENS:
            raise ValueError(f"num_tokens of candidate {index}: {shown(number)}")
        if (score := finite(made.score[index])) is None or abs(score) > MAX_SCORE:
            raise ValueError(f"score of candidate {index}: {shown(made.score[index])}")
    if any(abs(s) > MAX_SCORE for scores in made.partial.values() for s in scores.values()):
        raise ValueError("a partial score is beyond all scores")


def _logged(
    run: Run, idx: int, path: Path, number: int, item: dict[str, Any], with_states: bool
) -> Logged:
    name = shown(path.name)
    try:
        partials = partials_of(item)
        made = Logged(
            json_idx=idx,
            run=run,
            item=item,
            num_tokens={t["candidate"]: t["num_tokens"] for t in item["trajectories"]},
            stopped={t["candidate"]: t["finish_reason"] == "stop" for t in item["trajectories"]},
            score={t["candidate"]: t["score"] for t in item["trajectories"]},
            partial=partials,
        )
        if partials:
            _check(item, made)
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(f"{name}: partial scores or trajectories are damaged ({error})") from error
    if not partials:
        raise BadFile(f"{name}: no partial scores; Best-of-N with --log_partial records them")
    if with_states:
        made.states = read_states(states_path(path, number))
        states = made.states
        made.place = {
            (int(states.candidate[place]), int(states.length[place])): int(place)
            for place in np.flatnonzero(states.finished == 0)
        }
    return made
