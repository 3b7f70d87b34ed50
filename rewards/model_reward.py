"""Rewards that are language models: read by the engine, scored by a head or by likelihood.

Where the generator and the reward model share a vocabulary, the candidates' ids are read as they
are; otherwise the answers go through text, in parts: while the device reads one, a thread tokenises
the next. Either way the reader keeps the longest common prefix of what it read before, so a round
costs the new tokens and the turn's end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch

from engine.candidates import Candidate
from engine.reader import Reader
from engine.scoring import LikelihoodReader
from rewards.heads import Head, head_sha256
from suite.chat import Chat

TEXTS_AT_ONCE = 256  # answers of a part: enough to fill the device

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


class ModelReward:
    """A backbone with a head at the last token."""

    def __init__(self, reader: Reader, head: Head, chat: Chat, decode: Decode | None) -> None:
        """`decode` turns the generator's ids into text; None where the vocabularies are one."""
        self.reader, self.head, self.chat, self.decode = reader, head, chat, decode
        self.num_params = reader.model.config.num_params
        self.truncated: set[int] = set()  # candidates whose answer was cut to the model's length
        self.last_hidden: torch.Tensor | None = None  # [candidates, hidden] of the last score()
        self.text_sec = 0.0  # of decoding and encoding since `reset_counter`
        self.text_wait_sec = 0.0  # of these, while nothing was read

    @property
    def tokens_read(self) -> int:
        return self.reader.tokens_read

    def reset_counter(self) -> None:
        self.reader.tokens_read = 0
        self.text_sec = self.text_wait_sec = 0.0

    @property
    def kv_bytes(self) -> int:
        return self.reader.cache.used_bytes

    @property
    def hidden_size(self) -> int:
        return self.reader.model.config.hidden_size

    @cached_property
    def head_sha256(self) -> str:
        return head_sha256(self.head)

    def last_hidden_states(self) -> np.ndarray:
        """`[candidates, hidden]` float32, in the order of the last call of `score`."""
        assert self.last_hidden is not None, "score() comes first"
        return self.last_hidden.float().cpu().numpy()

    def fixed_tokens(self) -> tuple[int, int]:
        """Tokens read once a prompt, and those behind each answer each time."""
        return len(self._prompt_ids), len(self.chat.after_ids)

    def begin(self, prompt: str) -> None:
        self._prompt = prompt
        self._prompt_ids = np.asarray(self.chat.prompt_ids(prompt), dtype=np.int64)
        self.truncated = set()
        limit = min(self.reader.model.config.max_positions, self.reader.cache.prompt_k.shape[2])
        if len(self._prompt_ids) + len(self.chat.after_ids) >= limit:
            raise ValueError(
                f"the prompt has {len(self._prompt_ids)} tokens for the reward model, which reads "
                f"at most {limit}"
            )
        self.head.begin(self.reader.begin(self._prompt_ids))

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        if not candidates:
            return []
        hidden = torch.cat([self.reader.read(part) for part in self._parts(candidates)])
        self.last_hidden = hidden
        return [_number(score) for score in self.head.score(hidden).tolist()]

    def keep_only(self, indices: Sequence[int]) -> None:
        self.reader.keep_only(indices)

    def fork(self, parents: Sequence[int], children: Sequence[int]) -> None:
        self.reader.fork(parents, children)

    def _parts(self, candidates: Sequence[Candidate]) -> Iterator[dict[int, np.ndarray]]:
        """The conversations by candidate; one part where no text is needed."""
        size = TEXTS_AT_ONCE if self.decode else len(candidates)
        parts = [candidates[i : i + size] for i in range(0, len(candidates), size)]
        for part, ids in zip(parts, self._ahead(parts), strict=True):
            yield dict(zip([c.index for c in part], ids, strict=True))

    def _ahead(self, parts: Sequence[Sequence[Candidate]]) -> Iterator[list[np.ndarray]]:
        """The ids of each part; those of the next are made while a part is being read."""
        if self.decode is None:
            yield from map(self._ids, parts)
            return
        with ThreadPoolExecutor(1, "text") as pool:
            coming = pool.submit(self._timed_ids, parts[0])
            for i in range(len(parts)):
                start = time.perf_counter()
                ids = coming.result()
                self.text_wait_sec += time.perf_counter() - start
                if i + 1 < len(parts):  # one part ahead: a run that is stopped waits for no more
                    coming = pool.submit(self._timed_ids, parts[i + 1])
                yield ids

    def _timed_ids(self, candidates: Sequence[Candidate]) -> list[np.ndarray]:
        start = time.perf_counter()
        ids = self._ids(candidates)
        self.text_sec += time.perf_counter() - start
        return ids

    def _ids(self, candidates: Sequence[Candidate]) -> list[np.ndarray]:
        """The whole conversation of each candidate in the reward model's ids."""
        if self.decode is None:
            after = self.chat.after_ids
            whole = [np.concatenate((self._prompt_ids, c.answer, after)) for c in candidates]
        else:
            texts = self.decode([c.answer for c in candidates])
            whole = self.chat.conversation_ids(self._prompt, texts)
        return [
            self._bounded(candidate.index, np.asarray(ids, dtype=np.int64))
            for candidate, ids in zip(candidates, whole, strict=True)
        ]

    def _bounded(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Cut what is too long for the model: the answer's end, never what closes it."""
        limit = self.reader.model.config.max_positions
        if len(ids) <= limit:
            return ids
        self.truncated.add(index)
        after = np.asarray(self.chat.after_ids, dtype=np.int64)
        return np.concatenate((ids[: limit - len(after)], after))


class SelfReward:
    """The generator's own perplexity: -exp(mean negative log-likelihood of prompt and answer)."""

    truncated: frozenset[int] = frozenset()  # it reads as far as it writes

    def __init__(self, reader: Reader, prompt_ids: Callable[[str], list[int]]) -> None:
        self.likelihood = LikelihoodReader(reader)
        self.num_params = reader.model.config.num_params
        self._encode = prompt_ids

    @property
    def tokens_read(self) -> int:
        return self.likelihood.reader.tokens_read

    def reset_counter(self) -> None:
        self.likelihood.reader.tokens_read = 0

    @property
    def kv_bytes(self) -> int:
        return self.likelihood.reader.cache.used_bytes

    def fixed_tokens(self) -> tuple[int, int]:
        return len(self._prompt_ids), 0

    def begin(self, prompt: str) -> None:
        self._prompt_ids = np.asarray(self._encode(prompt), dtype=np.int64)
        self.likelihood.begin(self._prompt_ids)

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        sequences = {c.index: np.concatenate((self._prompt_ids, c.answer)) for c in candidates}
        sums = self.likelihood.read(sequences)
        return [_number(-_exp(-total / count)) if count else math.nan for total, count in sums]

    def keep_only(self, indices: Sequence[int]) -> None:
        self.likelihood.reader.keep_only(indices)

    def fork(self, parents: Sequence[int], children: Sequence[int]) -> None:
        self.likelihood.fork(parents, children)


def _number(score: float) -> float:
    """An infinite score is none."""
    return score if math.isfinite(score) else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
