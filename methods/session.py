"""The shared life of one prompt: its candidates, their scores, and what was measured of them.

A method sees candidates and scores, never devices. Invariant: every candidate that was started ends
in exactly one of `completed`, `rejected` or `failed`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.candidates import Candidate, End
from rewards.base import RewardFailed
from rewards.value_head import ValueHead, compact
from suite.hidden import States
from suite.settings import Settings

if TYPE_CHECKING:
    from suite.assembly import Assembly
    from suite.progress import Progress


class PromptFailed(RuntimeError):
    """This prompt has no result; the message says why. The run goes on with the others."""


@dataclass(slots=True)
class Session:
    """One prompt on one process."""

    settings: Settings
    parts: Assembly
    prompt: str
    prompt_ids: list[int]
    stream_key: int
    max_length: int  # answer tokens at most
    progress: Progress
    head: ValueHead | None = None
    completed: list[Candidate] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    partials: dict[str, list[list[Any]]] = field(default_factory=dict)  # length -> [index, score]
    clock: list[list[Any]] = field(default_factory=list)
    states: list[States] = field(default_factory=list)  # with --log_hidden
    num_ended: int = 0  # candidates that came to an end by themselves
    _predicted: dict[int, float] = field(default_factory=dict)  # by the value head
    _reward_started: bool = False
    _generated: int = 0  # tokens at the end of the last round
    _read: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to the clock."""
        start = time.perf_counter()
        yield
        self.clock.append([name, time.perf_counter() - start])

    def start(self, indices: Sequence[int]) -> None:
        """First tokens of these candidates; the prompt is prefilled with the first of them."""
        decoder = self.parts.decoder
        with self.phase("generation: prefill"):
            if decoder.is_on(self.stream_key):
                decoder.start_more(indices)
            else:
                decoder.start(self.prompt_ids, self.stream_key, indices)

    def decode(self, stop_length: int | None = None) -> list[Candidate]:
        """Decode the live rows until a length or memory ends; returns those that finished.

        At `max_length` rows finish, at `stop_length` they only pause.
        """
        decoder = self.parts.decoder

        def on_look() -> None:
            self.progress.update(
                rows=len(decoder.live), length=decoder.length, round=len(self.rounds)
            )

        with self.phase("generation: decode"):
            decoder.run(self.max_length, on_look, stop_length)
        finished = decoder.take_finished()
        for candidate in finished:
            if candidate.end is End.FAILED:
                self.fail(candidate, "logits without a finite value")
        ended = [candidate for candidate in finished if candidate.end is not End.FAILED]
        self.num_ended += len(ended)
        return ended

    def score(self, candidates: Sequence[Candidate]) -> None:
        """Give each candidate the score of its tokens as they stand."""
        reward = self.parts.reward
        with self.phase("reward: score"):
            try:
                if not self._reward_started:
                    self._reward_started = True
                    reward.begin(self.prompt)
                    self._read = 0
                for candidate, score in zip(candidates, reward.score(candidates), strict=True):
                    candidate.score = score
            except (RewardFailed, ValueError) as error:
                raise PromptFailed(f"reward: {error}") from error
            if candidates and (self.head or self.settings.log_hidden):
                self._look_inside(candidates)

    def score_round(self, live: Sequence[Candidate], ended: Sequence[Candidate]) -> None:
        """Score both; what has ended is read first, and its room is the others' from then on."""
        if ended:
            self.score(ended)
            self.parts.reward.keep_only([c.index for c in live])
        self.score(live)

    def _look_inside(self, candidates: Sequence[Candidate]) -> None:
        """Log the reward model's hidden states, and let the value head read those unfinished."""
        hidden = compact(self.parts.reward.last_hidden_states())
        scores = np.asarray([c.score for c in candidates], dtype=np.float64)
        lengths = np.asarray([c.num_tokens for c in candidates], dtype=np.int32)
        running = np.asarray([c.end is End.RUNNING for c in candidates])
        if self.settings.log_hidden:
            indices = np.asarray([c.index for c in candidates], dtype=np.int32)
            rounds = np.full(len(indices), len(self.rounds), dtype=np.int32)
            self.states.append(States(indices, rounds, lengths, ~running, scores, hidden))
        if self.head is None or not running.any():
            return
        places = np.flatnonzero(running)
        length = int(lengths[places[0]])  # rows in lockstep have one length
        values = self.head.predict(hidden[places], scores[places], length).tolist()
        self._predicted = {
            candidates[i].index: v for i, v in zip(places.tolist(), values, strict=True)
        }

    def value(self, candidate: Candidate) -> float:
        """What a candidate ranks by at a rejection: finished ones by score, always."""
        if candidate.end is End.RUNNING and self.head is not None:
            return self._predicted[candidate.index]
        return math.nan if candidate.score is None else candidate.score

    def live(self) -> list[Candidate]:
        """The unfinished candidates, with their tokens so far."""
        decoder = self.parts.decoder
        for row, candidate in enumerate(decoder.live):
            candidate.tokens = decoder.tokens_of(row)
        return list(decoder.live)

    def log_round(
        self,
        candidates: Sequence[Candidate],
        stop_length: int,
        cutoff: float | None,
        kept: int,
        **more: Any,
    ) -> None:
        """Record what a round of scoring saw and decided, before anything is cut."""
        generated, read = self.parts.decoder.tokens_generated, self.parts.reward.tokens_read
        self.rounds.append(
            {
                "round": len(self.rounds),
                "rows": len(candidates),
                "stop_length": stop_length,
                "candidates": [c.index for c in candidates],
                "scores": [finite(c.score) for c in candidates],
                "cutoff": finite(cutoff),
                "kept": kept,
                "tokens_generated": generated - self._generated,
                "tokens_scored": read - self._read,
                "kv_bytes": self.parts.decoder.cache.used_bytes,
                "reward_kv_bytes": self.parts.reward.kv_bytes,
                **more,
            }
        )
        self._generated, self._read = generated, read

    def score_the_rest(self, candidates: Sequence[Candidate]) -> None:
        """The last scoring: finished candidates that have no score of their whole text."""
        rest = [c for c in candidates if c.score is None]
        self.score(rest)
        self.log_last_round(rest, len(candidates))

    def log_last_round(self, scored: Sequence[Candidate], kept: int) -> None:
        longest = max((c.num_tokens for c in scored), default=0)
        self.log_round(scored, longest, None, kept)

    def reject(self, candidate: Candidate, duplicate_of: int | None = None) -> None:
        """Cut by the reward model, or a fork that repeats another candidate's whole text."""
        candidate.end = End.REJECTED
        entry = {
            "candidate": candidate.index,
            "round": max(0, len(self.rounds) - 1),
            "length": candidate.num_tokens,
            "score": finite(candidate.score),
        }
        if duplicate_of is not None:
            entry["duplicate_of"] = duplicate_of
        self.rejected.append(entry)

    def fail(self, candidate: Candidate, reason: str) -> None:
        candidate.end = End.FAILED
        self.failed.append({"candidate": candidate.index, "reason": reason})

    def complete(self, candidates: Sequence[Candidate]) -> None:
        """These are the method's completed candidates; those without a score have failed."""
        for candidate in sorted(candidates, key=lambda c: c.index):
            if candidate.score is None or not math.isfinite(candidate.score):
                self.fail(candidate, f"its score is {candidate.score}")
            else:
                self.completed.append(candidate)
        if not self.completed:
            reasons = sorted({entry["reason"] for entry in self.failed})
            raise PromptFailed(f"no candidate has a score: {'; '.join(reasons) or 'none started'}")


def finite(score: float | None) -> float | None:
    """JSON has no NaN: a score that is no number is null."""
    return score if score is not None and math.isfinite(score) else None
