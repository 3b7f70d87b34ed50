"""The methods: how candidates of one prompt are decoded, scored, cut, and the best of them found.

`Session` is the shared life of one prompt; a method is a function of it, registered in METHODS.
Methods see candidates and scores, never devices. Invariant: every candidate that was started ends
in exactly one of `completed`, `rejected` or `failed`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.candidates import Candidate, End
from engine.plan import first_stretch, pages_for
from engine.rejection import keep_best, ranked
from rewards.base import RewardFailed
from suite.settings import Settings, settings_for_record

if TYPE_CHECKING:
    from suite.assembly import Assembly
    from suite.processes import Processes
    from suite.progress import Progress
    from suite.prompts import Prompt


class PromptFailed(RuntimeError):
    """This prompt has no result; the message says why. The run goes on with the others."""


@dataclass(slots=True)
class Session:
    """One prompt on one process: its candidates and what was measured of them."""

    settings: Settings
    parts: Assembly
    prompt: str
    prompt_ids: list[int]
    stream_key: int
    max_length: int  # answer tokens at most
    progress: Progress
    completed: list[Candidate] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    clock: list[list[Any]] = field(default_factory=list)
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

    def decode(self, max_length: int) -> list[Candidate]:
        """Decode the live rows until length or memory ends; returns those that finished."""
        decoder = self.parts.decoder

        def on_look() -> None:
            self.progress.update(
                rows=len(decoder.live), length=decoder.length, round=len(self.rounds)
            )

        with self.phase("generation: decode"):
            decoder.run(max_length, on_look)
        finished = decoder.take_finished()
        for candidate in finished:
            if candidate.end is End.FAILED:
                self.fail(candidate, "logits without a finite value")
        return [candidate for candidate in finished if candidate.end is not End.FAILED]

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

    def live(self) -> list[Candidate]:
        """The unfinished candidates, with their tokens so far."""
        decoder = self.parts.decoder
        for row, candidate in enumerate(decoder.live):
            candidate.tokens = decoder.tokens_of(row)
        return list(decoder.live)

    def log_round(
        self, candidates: Sequence[Candidate], stop_length: int, cutoff: float | None, kept: int
    ) -> None:
        """Record what a round of scoring saw and decided, before anything is cut."""
        generated, read = self.parts.decoder.tokens_generated, self.parts.reward.tokens_read
        self.rounds.append(
            {
                "round": len(self.rounds),
                "rows": len(candidates),
                "stop_length": stop_length,
                "candidates": [c.index for c in candidates],
                "scores": [_finite(c.score) for c in candidates],
                "cutoff": _finite(cutoff),
                "kept": kept,
                "tokens_generated": generated - self._generated,
                "tokens_scored": read - self._read,
                "kv_bytes": self.parts.decoder.cache.used_bytes,
                "reward_kv_bytes": self.parts.reward.kv_bytes,
            }
        )
        self._generated, self._read = generated, read

    def reject(self, candidate: Candidate) -> None:
        candidate.end = End.REJECTED
        self.rejected.append(
            {
                "candidate": candidate.index,
                "round": len(self.rounds) - 1,
                "length": candidate.num_tokens,
                "score": _finite(candidate.score),
            }
        )

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


def best_of_n(session: Session) -> None:
    """All candidates run to their end, in waves that fit in memory; then all are scored."""
    settings, plan = session.settings, session.parts.plan
    _run_waves(session, settings.batch_size, plan.rows_for(session.max_length))


def speculative_rejection(session: Session) -> None:
    """Decode until memory is full, score what is there, cut the worst, go on (Sun et al. 2024)."""
    settings, plan = session.settings, session.parts.plan
    alpha = settings.alpha
    if alpha == 0.0:  # never cuts: as many rows as fit at full length
        fit = plan.rows_for(session.max_length)
        return _run_waves(session, _initial_rows(settings, fit), fit)
    fit = plan.rows_for(first_stretch(plan.page_size, session.max_length))
    session.start(range(min(fit, _initial_rows(settings, fit))))
    pool: list[Candidate] = []  # finished and not cut
    while True:
        pool += session.decode(session.max_length)
        if not session.parts.decoder.live:
            break
        pool = _reject(session, pool, alpha)
    _score_the_rest(session, pool)
    session.complete(pool)


METHODS: dict[str, Callable[[Session], None]] = {
    "best_of_n": best_of_n,
    "speculative_rejection": speculative_rejection,
}


def _initial_rows(settings: Settings, fit: int) -> int:
    rows = settings.init_batch_size or fit
    return min(rows, settings.max_batch_size or rows)


def _run_waves(session: Session, count: int, per_wave: int) -> None:
    """`count` candidates to their end, `per_wave` at a time."""
    done: list[Candidate] = []
    for first in range(0, count, per_wave):
        session.start(range(first, min(first + per_wave, count)))
        done += session.decode(session.max_length)
    _score_the_rest(session, done)
    session.complete(done)


def _score_the_rest(session: Session, candidates: Sequence[Candidate]) -> None:
    """The last scoring: finished candidates that no round has scored at their end."""
    rest = [c for c in candidates if c.score is None]
    session.score(rest)
    longest = max((c.num_tokens for c in rest), default=0)
    session.log_round(rest, longest, None, len(candidates))


def _reject(session: Session, pool: list[Candidate], alpha: float) -> list[Candidate]:
    """One round: score, keep the best, go on with the unfinished of them.

    Returns the finished candidates that stay. A finished candidate's score is final.
    """
    decoder, reward = session.parts.decoder, session.parts.reward
    live = session.live()
    session.score([*live, *(c for c in pool if c.score is None)])
    everyone = {c.index: c for c in (*live, *pool)}
    kept = keep_best({i: c.score for i, c in everyone.items()}, alpha)
    finished_kept = [i for i in kept if everyone[i].end is not End.RUNNING]
    unfinished = [i for i in kept if everyone[i].end is End.RUNNING]
    unfinished = unfinished[: _rows_that_can_grow(session)]
    stay = {*finished_kept, *unfinished}
    lowest = ranked({i: everyone[i].score for i in stay})[-1]
    session.log_round(live, decoder.length, everyone[lowest].score, len(stay))
    for candidate in everyone.values():
        if candidate.index not in stay:
            session.reject(candidate)
    going_on = set(unfinished)
    rows = [row for row, candidate in enumerate(live) if candidate.index in going_on]
    with session.phase("generation: rejection"):
        decoder.select(rows)
    for candidate in decoder.live:
        candidate.score = None  # of a text that goes on
    reward.keep_only(unfinished)
    return [everyone[i] for i in finished_kept]


def _rows_that_can_grow(session: Session) -> int:
    """How many rows can go on by `min_round_tokens` in the memory that there is."""
    plan = session.parts.plan
    goal = session.parts.decoder.length + session.settings.min_round_tokens
    return max(1, plan.pages // pages_for(min(goal, session.max_length), plan.page_size))


class Generator:
    """Runs one method on one prompt after the other, on this process."""

    def __init__(self, settings: Settings, processes: Processes, parts: Assembly) -> None:
        self.settings, self.processes, self.parts = settings, processes, parts
        self.process_seed = settings.seed
        if settings.parallel == "candidates":
            self.process_seed += processes.rank
        name = "speculative_rejection" if settings.speculative_rejection else "best_of_n"
        self.method = METHODS[name]

    def run(self, prompt: Prompt, progress: Progress) -> dict[str, Any]:
        """This process's object for the prompt's file. Raises PromptFailed."""
        start = time.perf_counter()
        self.parts.reset_counters()
        try:
            prompt_ids = self.parts.chat.prompt_ids(prompt.prompt)
        except ValueError as error:
            raise PromptFailed(str(error)) from error
        too_long = self._too_long(prompt_ids)
        if too_long:
            return {**self._head(prompt, start), "skipped": too_long}
        session = Session(
            settings=self.settings,
            parts=self.parts,
            prompt=prompt.prompt,
            prompt_ids=prompt_ids,
            stream_key=stream_key(self.process_seed, prompt.json_idx, prompt.prompt),
            max_length=min(self.parts.plan.max_answer_tokens, self._bound - len(prompt_ids)),
            progress=progress,
        )
        self.method(session)
        with session.phase("text: decode"):
            trajectories = self._trajectories(session)
        return {
            **self._head(prompt, start),
            "clock": session.clock,
            "trajectories": trajectories,
            "rejected": session.rejected,
            "failed_rows": session.failed,
            "rounds": session.rounds,
            "num_prompt_tokens": len(prompt_ids),
            "tokens_generated": self.parts.decoder.tokens_generated,
            "tokens_scored": self.parts.reward.tokens_read,
            **self.parts.measured(),
        }

    @property
    def _bound(self) -> int:
        """Tokens of prompt and answer together."""
        return min(self.settings.max_tokens, self.parts.decoder.model.config.max_positions)

    def _too_long(self, prompt_ids: Sequence[int]) -> str | None:
        if len(prompt_ids) < self._bound:
            return None
        return (
            f"the prompt has {len(prompt_ids)} tokens and the bound of prompt and answer is "
            f"{self._bound}; raise --max_tokens"
        )

    def _head(self, prompt: Prompt, start: float) -> dict[str, Any]:
        return {
            **settings_for_record(self.settings),
            "process_seed": self.process_seed,
            "process_rank": self.processes.rank,
            "num_processes": self.processes.world_size,
            "prompt": prompt.record,
            "elapsed_sec": time.perf_counter() - start,
            "clock": [],
            "trajectories": [],
        }

    def _trajectories(self, session: Session) -> list[dict[str, Any]]:
        texts = self.parts.chat.decode([c.answer for c in session.completed])
        return [
            self._trajectory(session.prompt, candidate, text)
            for candidate, text in zip(session.completed, texts, strict=True)
        ]

    def _trajectory(self, prompt: str, candidate: Candidate, text: str) -> dict[str, Any]:
        entry = {
            "prompt": prompt,
            "output": text,
            "score": candidate.score,
            "candidate": candidate.index,
            "finish_reason": candidate.end.value,
            "num_tokens": candidate.num_tokens,
        }
        if candidate.parent is not None:
            entry |= {"parent": candidate.parent, "fork_length": candidate.fork_length}
        if self.settings.save_token_ids:
            entry["token_ids"] = np.asarray(candidate.tokens).tolist()
        return entry


def stream_key(process_seed: int, json_idx: int, prompt: str) -> int:
    """The 64-bit key of a prompt's random streams: seed, index and text, nothing else."""
    text = f"{process_seed}|{json_idx}|{prompt}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def _finite(score: float | None) -> float | None:
    """JSON has no NaN: a score that is no number is null."""
    return score if score is not None and math.isfinite(score) else None


def build(settings: Settings, processes: Processes) -> Generator:
    """Load the models, plan the memory, say the plan. Raises ValueError on a user's mistake."""
    from suite.assembly import assemble

    return Generator(settings, processes, assemble(settings, processes))
