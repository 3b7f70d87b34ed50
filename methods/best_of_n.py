"""Best-of-N: all candidates run to their end, in waves that fit in memory; the highest score wins.

With `--log_partial` the first tokens of every answer are scored too, each length reading only what
it adds. That costs reading, changes no answer, and is what postprocess/replay.py and
postprocess/fit_value_head.py work from.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.candidates import Candidate
from methods.session import Session, finite


def best_of_n(session: Session) -> None:
    settings, plan = session.settings, session.parts.plan
    run_waves(session, settings.batch_size, plan.rows_for(session.max_length))


def run_waves(session: Session, count: int, per_wave: int) -> None:
    """`count` candidates to their end, `per_wave` at a time."""
    done: list[Candidate] = []
    for first in range(0, count, per_wave):
        session.start(range(first, min(first + per_wave, count)))
        wave = session.decode()
        if session.settings.log_partial:
            _score_growing(session, wave)
        done += wave
    if session.settings.log_partial:
        session.log_last_round(done, len(done))
    else:
        session.score_the_rest(done)
    session.complete(done)


def _score_growing(session: Session, wave: Sequence[Candidate]) -> None:
    """Scores of the first tokens, as they would have been scored unfinished; then of the whole."""
    assert session.settings.log_partial is not None
    for length in map(int, session.settings.log_partial.split(",")):
        prefixes = [Candidate(c.index, c.tokens[:length]) for c in wave if c.num_tokens > length]
        session.score(prefixes)
        scored = [[c.index, finite(c.score)] for c in prefixes]
        session.partials.setdefault(str(length), []).extend(scored)
    session.score(wave)
    session.parts.reward.keep_only([])
