"""A decoder and a reward that look up a log, in the places of the engine's.

They answer exactly as the engine would for the candidates that were logged: who has finished at
which length, when memory is full, what a prefix scores, how many tokens were generated and read.
The invariant: no number here is invented; a prefix that was not logged takes the score of the
longest logged one within it, and is counted in `num_approximated`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from engine.candidates import Candidate, End
from engine.plan import Plan, pages_for
from postprocess.logged import Logged


class LoggedDecoder:
    """Rows in lockstep, as engine/decoder.py moves them when the host looks at every step."""

    def __init__(self, logged: Logged, plan: Plan) -> None:
        self.logged, self.plan = logged, plan
        self.live: list[Candidate] = []
        self.length = 0
        self.tokens_generated = 0
        self.cache = SimpleNamespace(used_bytes=0)
        self._finished: list[Candidate] = []

    @property
    def max_length(self) -> int:
        """The bound of this prompt's answers: a row that ran into it tells."""
        at_bound = [n for i, n in self.logged.num_tokens.items() if not self.logged.stopped[i]]
        if at_bound:
            return max(at_bound)
        bound = self.logged.item["max_tokens"] - self.logged.item["num_prompt_tokens"]
        return min(self.plan.max_answer_tokens, bound)

    def is_on(self, stream_key: int) -> bool:
        return False

    def start(self, prompt_ids: Sequence[int], stream_key: int, indices: Sequence[int]) -> None:
        self.live = [Candidate(i) for i in indices if i in self.logged.num_tokens]
        self.length = 0
        self._grow(1)

    def run(
        self, max_length: int, on_look: Callable[[], None], stop_length: int | None = None
    ) -> None:
        stop = min(stop_length or max_length, max_length)
        while self.live and self.length < stop:
            next_end = min(self.logged.num_tokens[c.index] for c in self.live)
            steps = min(stop, next_end) - self.length
            steps = min(steps, self._tokens_that_fit() - self.length)
            if steps <= 0:
                return
            self._grow(steps)

    def take_finished(self) -> list[Candidate]:
        finished, self._finished = self._finished, []
        return finished

    def tokens_of(self, row: int) -> np.ndarray:
        return np.zeros(self.length, dtype=np.int32)  # what they are does not matter here

    def select(self, rows: Sequence[int], fork_indices: Sequence[int] = ()) -> None:
        assert not len(fork_indices), "forks can't be replayed"
        self.live = [self.live[row] for row in rows]

    def num_that_can_grow(self, rows: Sequence[int], tokens: int) -> int:
        return min(len(rows), self.plan.pages // self._pages(self.length + tokens))

    def _tokens_that_fit(self) -> int:
        pages = self.plan.pages // len(self.live)
        return pages * self.plan.page_size + 1

    def _pages(self, answer_tokens: int) -> int:
        return pages_for(answer_tokens, self.plan.page_size)

    def _grow(self, steps: int) -> None:
        """All rows grow; those that have come to their end leave."""
        self.length += steps
        self.tokens_generated += steps * len(self.live)
        for candidate in self.live:
            if self.logged.num_tokens[candidate.index] <= self.length:
                stopped = self.logged.stopped[candidate.index]
                candidate.tokens = np.zeros(self.length, dtype=np.int32)
                candidate.end = End.STOP if stopped else End.LENGTH
                self._finished.append(candidate)
        self.live = [c for c in self.live if c.end is End.RUNNING]


class LoggedReward:
    """Scores from the log; counts what an incremental reader would read."""

    kv_bytes = 0
    num_params = 0

    def __init__(self, logged: Logged) -> None:
        self.logged = logged
        self.tokens_read = 0
        self.num_approximated = 0
        self._lengths = logged.lengths
        self._read: dict[int, int] = {}  # answer tokens read of each candidate
        self._hidden: list[int] = []  # places in the log's states of the last call

    def begin(self, prompt: str) -> None:
        self.tokens_read += self.logged.prompt_tokens

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        self._hidden = []
        return [self._score(candidate) for candidate in candidates]

    def last_hidden_states(self) -> np.ndarray:
        """Rows of finished candidates are zero: nothing reads them."""
        states = self.logged.states
        assert states is not None, "a value head needs the log's hidden states"
        places = np.asarray(self._hidden)
        return np.where(places[:, None] >= 0, states.hidden[places], 0)

    def keep_only(self, indices: Sequence[int]) -> None:
        pass  # what the engine forgets here is never scored again

    def _score(self, candidate: Candidate) -> float:
        index = candidate.index
        if candidate.end is not End.RUNNING:
            self._count(index, self.logged.answer_tokens(index))
            self._hidden.append(-1)
            return self.logged.score[index]
        self._count(index, candidate.num_tokens)
        length = self._logged_length(candidate.num_tokens)
        self.num_approximated += length != candidate.num_tokens
        self._hidden.append(self.logged.place.get((index, length), -1))
        if length >= self.logged.num_tokens[index]:
            return self.logged.score[index]  # it ends before the shortest logged length
        return self.logged.partial[length].get(index, math.nan)

    def _logged_length(self, length: int) -> int:
        """The longest logged length that is not longer; the shortest one below all of them."""
        return self._lengths[max(0, bisect_right(self._lengths, length) - 1)]

    def _count(self, index: int, answer_tokens: int) -> None:
        """The new tokens and the turn's end behind them; where nothing is new, one token."""
        if not self.logged.prompt_tokens:
            return  # a function reads no tokens
        before = self._read.get(index)
        self._read[index] = answer_tokens
        if before is None:
            self.tokens_read += answer_tokens + self.logged.end_tokens
        elif answer_tokens > before:
            self.tokens_read += answer_tokens - before + self.logged.end_tokens
        else:
            self.tokens_read += min(1, self.logged.end_tokens)
