"""Log-likelihoods of token sequences, without holding all logits at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.kv_cache import PagedKV
from engine.model import Transformer
from engine.ops import Ops, TorchOps
from engine.reader import Item, Reader

LOGIT_BYTES = 1 << 28  # of float32 logits at a time


def token_log_likelihoods(
    model: Transformer, hidden: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """log p(targets[i] | hidden[i]), `[tokens]` float32, with the logits in chunks."""
    rows = max(1, LOGIT_BYTES // (4 * model.config.vocab_size))
    parts = [
        torch.log_softmax(model.logits(h).float(), dim=-1).gather(1, t[:, None])[:, 0]
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, device=hidden.device)


class LikelihoodReader:
    """Sums of log-likelihoods over growing sequences, reading only new tokens.

    The sum covers every token but the first (nothing predicts it).
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._sums: dict = {}  # key -> (sum, tokens counted, hidden state after them)

    @torch.inference_mode()
    def begin(self, prompt_ids: Sequence[int]) -> None:
        hidden = self.reader.begin(prompt_ids)
        ids = torch.as_tensor(np.asarray(prompt_ids, dtype=np.int64)).to(hidden.device)
        sums = token_log_likelihoods(self.reader.model, hidden[:-1], ids[1:])
        self._prompt = (float(sums.double().sum()), len(ids) - 1, hidden[-1])
        self._sums = {}

    @torch.inference_mode()
    def read(self, sequences: dict) -> list[tuple[float, int]]:
        """(sum of log-likelihoods, tokens counted) of each whole sequence, prompt included.

        NOTE: sequences only ever grow between calls, as candidates do; an answer without a token
        has the prompt's own sum.
        """
        prompt_len = self.reader.cache.prompt_len
        if not self.reader.keep:
            self._sums = {}
        grown = {
            key: ids
            for key, ids in sequences.items()
            if len(ids) - 1 > self._sums.get(key, self._prompt)[1]
        }
        self.reader.read(grown, self._add)
        assert self.reader.cache.prompt_len == prompt_len, "a sequence lacks the prompt"
        return [self._sums.get(key, self._prompt)[:2] for key in sequences]

    def _add(self, hidden: torch.Tensor, tokens: torch.Tensor, items: Sequence[Item]) -> None:
        """Add up a chunk; what predicts a sequence's first new token was read before."""
        states = [self._sums[i.key] if i.past else self._prompt for i in items]
        ends = np.cumsum([item.num_new for item in items])
        starts = torch.from_numpy(ends - [item.num_new for item in items]).to(hidden.device)
        before = hidden.roll(1, dims=0)
        before[starts] = torch.stack([state[2] for state in states])
        values = token_log_likelihoods(self.reader.model, before, tokens).double().cpu()
        parts = values.split([item.num_new for item in items])
        for item, state, part, end in zip(items, states, parts, ends, strict=True):
            total = state[0] + float(part.sum())
            self._sums[item.key] = (total, state[1] + item.num_new, hidden[end - 1].clone())

    def fork(self, parents: Sequence, children: Sequence) -> None:
        """A child begins with its parent's sum."""
        self.reader.fork(parents, children)
        for parent, child in zip(parents, children, strict=True):
            if parent in self._sums:
                self._sums[child] = self._sums[parent]


def mean_log_likelihood(
    model: Transformer,
    prompt_ids: Sequence[int],
    answers: Sequence[Sequence[int]],
    ops: Ops | None = None,
) -> list[float]:
    """Mean log-likelihood a token of prompt and answer under the model, one for each answer."""
    cache = PagedKV(
        model.config,
        num_pages=0,
        page_size=1,
        max_rows=0,
        max_row_tokens=0,
        max_prompt=len(prompt_ids),
        dtype=model.dtype,
        device=model.device,
    )
    reader = Reader(model, ops or TorchOps(), cache, keep=False, chunk_tokens=8192)
    likelihood = LikelihoodReader(reader)
    likelihood.begin(prompt_ids)
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    sequences = {
        i: np.concatenate((prompt, np.asarray(answer, dtype=np.int64)))
        for i, answer in enumerate(answers)
    }
    return [total / max(1, count) for total, count in likelihood.read(sequences)]
