"""Speculative Rejection (Sun et al. 2024), and its relative that refills what a rejection frees.

Decode until a stop, score what is there, cut the worst, go on with the rest; with `--refill` the
freed memory goes to forks of the survivors, so the rows stay as many. When to stop, how much to cut
and whom to fork are plain arithmetic in engine/schedule.py, rejection.py, alpha_rule.py and
refill.py. postprocess/replay.py runs this very code on logged scores.

Who is where around one round (a to d unfinished, F finished; alpha 0.5; refill to 4 rows):

    before    rows a b c d     pool F        scores  b > F > a > d > c
    cut       rows b           pool F        kept round(0.5 * 5) = 2
    refilled  rows b b1 b2 b3  pool F        b1 to b3 are new candidates with b's tokens so far
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from engine.alpha_rule import AutoAlpha, expected_end
from engine.candidates import Candidate
from engine.plan import first_stretch
from engine.refill import STRETCH_TOKENS, parents_of_forks
from engine.rejection import keep_best, num_kept, ranked
from engine.schedule import Schedule
from methods.best_of_n import run_waves
from methods.session import Session, finite

USUAL_ALPHA = 0.5  # what the stops of halving follow with --alpha auto: they double
log = logging.getLogger(__name__)


def speculative_rejection(session: Session) -> None:
    settings, plan = session.settings, session.parts.plan
    wish, most = settings.init_batch_size, settings.max_batch_size
    if settings.alpha == 0.0:  # never cuts: as many rows as fit at full length
        fit = plan.rows_for(session.max_length)
        return run_waves(session, min(wish or fit, most or wish or fit), fit)
    fit = plan.rows_for(first_stretch(plan.page_size, session.max_length))
    wanted = min(wish or fit, most or wish or fit)
    if wanted > fit:
        log.warning("--init_batch_size %d: only %d rows fit in memory at the start", wanted, fit)
    _Run(session, min(wanted, fit)).go()


@dataclass(slots=True)
class _Cut:
    """What a round decides: who stays, best first, and what the record says of it."""

    unfinished: list[int]
    finished: list[int]
    alpha: float
    note: dict[str, Any]


@dataclass(slots=True)
class _Run:
    """One prompt's rounds."""

    session: Session
    num_rows: int  # at the start; a refill makes them --refill_to times what they were
    schedule: Schedule = field(init=False)
    auto: AutoAlpha | None = field(init=False)
    pool: list[Candidate] = field(default_factory=list)  # finished and not cut
    texts: dict[bytes, Candidate] = field(default_factory=dict)  # whole answers: who came first
    next_index: int = field(init=False)
    alpha: float = 0.0  # of the last round

    def __post_init__(self) -> None:
        s = self.session.settings
        self.schedule = Schedule.parse(s.schedule, s.min_tokens, s.min_round_tokens)
        self.auto = AutoAlpha() if s.alpha == "auto" else None
        self.next_index = self.num_rows

    def go(self) -> None:
        session, decoder = self.session, self.session.parts.decoder
        session.start(range(self.num_rows))
        while True:
            self._add_finished(session.decode(self._next_stop()))
            if not decoder.live:
                break
            self._round()
        session.score_the_rest(self.pool)
        session.complete(self.pool)

    def _next_stop(self) -> int | None:
        if not self._has_to_choose():
            return None
        alpha = USUAL_ALPHA if self.auto else self.alpha
        return self.schedule.next_stop(self.session.parts.decoder.length, alpha)

    def _has_to_choose(self) -> bool:
        """False where a scheduled round would keep everyone, and so would be read for nothing."""
        settings, num_live = self.session.settings, len(self.session.parts.decoder.live)
        number = num_live + len(self.pool)
        cuts = number > 1 if self.auto else num_kept(number, float(settings.alpha)) < number
        forks = settings.refill and self._rows_after_refill() > num_live
        return cuts or forks

    def _add_finished(self, finished: list[Candidate]) -> None:
        """Into the pool; where forks are about, an answer that was there before is not another."""
        for candidate in sorted(finished, key=lambda c: c.index):
            first = self.texts.setdefault(candidate.tokens.tobytes(), candidate)
            if first is candidate or (first.parent is None and candidate.parent is None):
                self.pool.append(candidate)
            else:
                self.session.reject(candidate, duplicate_of=first.index)

    def _round(self) -> None:
        """Score, keep the best, refill. A finished candidate's score is final."""
        session, decoder = self.session, self.session.parts.decoder
        live = session.live()
        session.score_round(live, [c for c in self.pool if c.score is None])
        everyone = {c.index: c for c in (*live, *self.pool)}
        values = {i: session.value(c) for i, c in everyone.items()}
        cut = self._cut(live, values)
        stay = {*cut.unfinished, *cut.finished}
        cutoff = values[ranked({i: values[i] for i in stay})[-1]]
        session.log_round(live, decoder.length, cutoff, len(stay), **cut.note)
        for candidate in everyone.values():
            if candidate.index not in stay:
                session.reject(candidate)
        self.pool = [everyone[i] for i in cut.finished]
        self.alpha = cut.alpha
        self._go_on(live, cut.unfinished)
        if self.auto:
            kept = {c.index: values.get(c.index, values.get(c.parent)) for c in decoder.live}
            self.auto.remember(kept, decoder.length)

    def _cut(self, live: list[Candidate], values: dict[int, float]) -> _Cut:
        length = self.session.parts.decoder.length
        running = {c.index: values[c.index] for c in live}
        done = {c.index: values[c.index] for c in self.pool}
        alpha, note = self._alpha(running, done)
        note |= {"alpha": alpha}
        if self.session.head:
            note["values"] = [finite(value) for value in running.values()]
        if note.get("ended_early"):
            return _Cut([], ranked(done), alpha, note)
        kept = keep_best(values, alpha)
        unfinished = [i for i in kept if i in running]
        room = self._num_that_can_grow(live, unfinished)
        if not self.schedule.may_cut(length):
            log.info("memory is full at %d tokens: %d of %d rows go on", length, room, len(live))
        return _Cut(unfinished[:room], [i for i in kept if i in done], alpha, note)

    def _alpha(
        self, running: dict[int, float], done: dict[int, float]
    ) -> tuple[float, dict[str, Any]]:
        """This round's rejection rate, and what the record says of how it came about."""
        session, decoder = self.session, self.session.parts.decoder
        if not self.schedule.may_cut(decoder.length):
            return 0.0, {}  # only as many as the others need to grow
        if not self.auto:
            return float(session.settings.alpha), {}
        end = expected_end(
            decoder.length, decoder.tokens_generated, session.num_ended, session.max_length
        )
        verdict = self.auto.decide(running, done, decoder.length, end)
        note = {"correlation": verdict.correlation, "ended_early": verdict.ends}
        return verdict.alpha, note

    def _num_that_can_grow(self, live: list[Candidate], ordered: list[int]) -> int:
        """How many can go on by `min_round_tokens` in the memory that there is."""
        session, decoder = self.session, self.session.parts.decoder
        row_of = {c.index: row for row, c in enumerate(live)}
        left = session.max_length - decoder.length
        tokens = min(session.settings.min_round_tokens, left)
        return max(1, decoder.num_that_can_grow([row_of[i] for i in ordered], tokens))

    def _go_on(self, live: list[Candidate], unfinished: list[int]) -> None:
        """Only these rows from here on, and forks of them in what they leave free."""
        session, decoder, reward = (
            self.session,
            self.session.parts.decoder,
            self.session.parts.reward,
        )
        going_on = set(unfinished)
        with session.phase("generation: rejection"):
            decoder.select([row for row, c in enumerate(live) if c.index in going_on])
            reward.keep_only(unfinished)
            if session.settings.refill and unfinished:
                self._refill(unfinished)
        for candidate in decoder.live:
            candidate.score = None  # of a text that goes on

    def _rows_after_refill(self) -> int:
        return max(1, round(self.num_rows * self.session.settings.refill_to))

    def _refill(self, survivors: list[int]) -> None:
        """Forks of the survivors, best first, until the rows are as many as they were."""
        session, decoder = self.session, self.session.parts.decoder
        self.num_rows = self._rows_after_refill()
        left = session.max_length - decoder.length
        if left < session.settings.min_round_tokens:
            return  # a fork could hardly differ from its parent
        stop = self._next_stop()
        stretch = min(left, stop - decoder.length if stop else STRETCH_TOKENS)
        wanted = self.num_rows - len(decoder.live)
        number = max(0, min(wanted, decoder.room_for_forks(stretch)))
        parents = parents_of_forks(survivors, number)
        children = list(range(self.next_index, self.next_index + number))
        self.next_index += number
        session.rounds[-1]["forks"] = number
        row_of = {c.index: row for row, c in enumerate(decoder.live)}
        rows = [*range(len(decoder.live)), *(row_of[parent] for parent in parents)]
        decoder.select(rows, children)
        session.parts.reward.fork(parents, children)
