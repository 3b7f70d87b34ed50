"""N rows of one prompt, decoded in lockstep until they finish, or memory or the length ends.

The decoder owns the rows: which candidate sits where, which have finished, who grows and how far
the memory goes. It does not know rewards. Invariant: live row i is `live[i]`, row i of the cache,
and column i of every device tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.candidates import Candidate, End
from engine.decode_state import DecodeState
from engine.kv_cache import PagedKV
from engine.memory import Chunk
from engine.model import Transformer
from engine.ops import Ops
from engine.packing import pack
from engine.stepper import ROW_MULTIPLE, EagerStepper, Sampler, Stepper, padded

PREFILL_CHUNK = 8192


class Decoder:
    """Decodes with one model, cache and set of sampling parameters; one prompt at a time."""

    def __init__(
        self,
        model: Transformer,
        ops: Ops,
        cache: PagedKV,
        sampler: Sampler,
        stop_ids: Sequence[int],
        *,
        max_rows: int,
        look_every: int = 1,
        ignore_stop: bool = False,
        max_rows_at_once: int = 4096,
        stepper: type[Stepper] = EagerStepper,
    ) -> None:
        self.model, self.ops, self.cache, self.sampler = model, ops, cache, sampler
        self.look_every = look_every
        size = padded(min(max_rows, max_rows_at_once))
        self.chunk = Chunk("rows", size, smallest=ROW_MULTIPLE)
        self.prompt_chunk = prompt_chunk()
        stops = () if ignore_stop else stop_ids
        self.state = DecodeState.allocate(cache, padded(max_rows), look_every, stops)
        self.stepper = stepper(model, ops, self.state, sampler, self.chunk)
        self.live: list[Candidate] = []
        self.finished: list[Candidate] = []
        self.tokens_generated = 0
        self._prompt_hidden: torch.Tensor | None = None  # [1, hidden] at the prompt's last token
        self.length = 0  # answer tokens of every live row
        self._sampled = np.zeros((0, 0), dtype=np.int32)  # [live rows, capacity >= length]

    @torch.inference_mode()
    def start(self, prompt_ids: Sequence[int], stream_key: int, candidates: Sequence[int]) -> None:
        """Prefill the prompt once and sample the first token of each candidate."""
        if not len(prompt_ids):
            raise ValueError("the prompt has no tokens")
        self.cache.clear()
        hidden = prefill(self.model, self.ops, self.cache, prompt_ids, self.prompt_chunk)
        self.state.begin(len(prompt_ids), stream_key)
        self._prompt_hidden = hidden[-1:]
        self._add_first_tokens(candidates)

    def is_on(self, stream_key: int) -> bool:
        """Whether the prompt of this stream is the one that is prefilled."""
        return self._prompt_hidden is not None and self.state.host_stream_key == stream_key

    @torch.inference_mode()
    def start_more(self, candidates: Sequence[int]) -> None:
        """Start another wave on the prompt that is already there."""
        self.cache.select([])
        self.state.begin(self.cache.prompt_len, self.state.host_stream_key)
        self._add_first_tokens(candidates)

    def take_finished(self) -> list[Candidate]:
        """The candidates that finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def forget_prompt(self) -> None:
        """Free everything, count from zero."""
        self.cache.clear()
        self.live, self.finished = [], []
        self._prompt_hidden = None
        self.tokens_generated = 0
        self.stepper.capture_sec = 0.0

    def _add_first_tokens(self, candidates: Sequence[int]) -> None:
        count = len(candidates)
        self.live = [Candidate(index) for index in candidates]
        self.cache.add_rows(count)
        self.length = 0
        self._sampled = np.zeros((count, 64), dtype=np.int32)
        self._load_candidates()
        self.chunk.retrying(self._sample_first, padded(count))
        self.state.after_step()
        self.state.count_on_host()
        self._look(1)

    def _sample_first(self) -> None:
        """All rows share the logits behind the prompt."""
        logits = self.model.logits(self._prompt_hidden.expand(ROW_MULTIPLE, -1))[:1]
        count, size = len(self.live), padded(self.chunk.size)
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            self.sampler(logits.expand(rows.stop - first, -1), self.state, rows)

    def _load_candidates(self) -> None:
        indices = torch.tensor([c.index for c in self.live], dtype=torch.int64)
        self.state.candidates[: len(indices)] = indices.to(self.model.device)

    def run(
        self,
        max_length: int,
        on_look: Callable[[], None] = lambda: None,
        stop_length: int | None = None,
    ) -> None:
        """Decode all live rows to `stop_length` answer tokens, or until memory is full.

        Rows that emit a stop token finish and free their pages at the next look, so the others get
        further. At `max_length` all live rows finish. `on_look` is called at every look.
        """
        stop_length = min(stop_length or max_length, max_length)
        while self.live and self.length < stop_length:
            steps = min(self.look_every, stop_length - self.length, self.steps_that_fit())
            if steps == 0:
                return
            self._run_block(steps)
            on_look()
        if self.length < max_length:
            return
        for row, candidate in enumerate(self.live):
            self._finish(candidate, self.tokens_of(row), End.LENGTH)
        self.live = []
        self._move(np.zeros(0, dtype=np.int64))

    def steps_that_fit(self) -> int:
        """Steps for which the live rows' pages and the free pages suffice."""
        cache = self.cache
        own = int(cache.pages_of(cache.lengths[:1]).max(initial=0))
        columns = own + cache.num_free_pages // max(1, len(self.live))
        room = min(columns * cache.page_size, cache.max_row_tokens)
        return max(0, room - int(cache.lengths.max(initial=0)))

    def num_that_can_grow(self, rows: Sequence[int], tokens: int) -> int:
        """How many of these live rows, from the first on, could go on together by `tokens`."""
        cache, rows = self.cache, np.asarray(rows, dtype=np.int64)
        want = int(cache.pages_of(cache.lengths[rows[:1]] + tokens).max(initial=0))
        growth = want - int(cache.pages_of(cache.lengths[rows[:1]]).max(initial=0))
        wanted = growth * np.arange(1, len(rows) + 1)
        return int((wanted <= cache.free_pages_keeping(rows)).sum())

    def room_for_forks(self, tokens: int) -> int:
        """How many forks the free pages hold when all rows, forks included, grow by `tokens`.

        A fork shares its parent's whole pages and needs a copy of the last, partly filled one.
        """
        cache = self.cache
        length = cache.lengths[:1]
        growth = int((cache.pages_of(length + tokens) - cache.pages_of(length)).max(initial=0))
        copied = int((length % cache.page_size > 0).sum())
        return max(0, (cache.num_free_pages - growth * len(self.live)) // max(1, growth + copied))

    def select(self, rows: Sequence[int], fork_indices: Sequence[int] = ()) -> None:
        """Keep live `rows`, in this order; the last `len(fork_indices)` of them are forks.

        A fork is a new candidate with its own random stream from here on.
        """
        rows = np.asarray(rows, dtype=np.int64)
        first_fork = len(rows) - len(fork_indices)
        live = [self.live[row] for row in rows[:first_fork]]
        for row, index in zip(rows[first_fork:], fork_indices, strict=True):
            parent = self.live[row].index
            live.append(Candidate(index, parent=parent, fork_length=self.length))
        self._move(rows)
        self.live = live
        self._load_candidates()

    def tokens_of(self, row: int) -> np.ndarray:
        """The answer tokens of live row `row` so far (a view, valid until the next step)."""
        return self._sampled[row, : self.length]

    def _move(self, rows: np.ndarray) -> None:
        """Row i becomes old row `rows[i]`, in the cache, on the device and on the host."""
        self.cache.select(rows)
        index = torch.from_numpy(rows).to(self.model.device)
        for tensor in (self.state.tokens, self.state.candidates):
            tensor[: len(rows)] = tensor[index]
        self._sampled = self._sampled[rows]

    @torch.inference_mode()
    def _run_block(self, steps: int) -> None:
        """`steps` decode steps without the host looking at the device, then one look."""
        length = int(self.cache.lengths[0])
        self.cache.grow(length + steps)
        self.stepper.run(len(self.live), steps)
        self._look(steps)

    def _look(self, steps: int) -> None:
        """Bring the block's tokens to the host and retire the rows that finished in it."""
        num_rows = len(self.live)
        block = self.state.history[:num_rows, :steps].to("cpu", torch.int32).numpy()
        flags = self.state.done, self.state.bad
        done, bad = (flag[:num_rows].to("cpu", copy=True).numpy() for flag in flags)
        self.state.begin_block()
        self._append(block)
        # A stop token is part of its answer, the token of a failed step (done < 0) is not.
        num_tokens = np.select([done > 0, done < 0], [done, -done - 1], steps)
        self.tokens_generated += int(num_tokens.sum())
        if not done.any():
            return
        lengths = self.length - steps + num_tokens
        for row in np.flatnonzero(done):
            tokens = self._sampled[row, : lengths[row]]
            self._finish(self.live[row], tokens, End.FAILED if done[row] < 0 else End.STOP)
        if bad.any() and self.cache.lengths.any():
            self.cache.scrub(np.flatnonzero(bad))
        keep = np.flatnonzero(done == 0)
        self.live = [self.live[row] for row in keep]
        self._move(keep)

    def _append(self, block: np.ndarray) -> None:
        """Add `[rows, steps]` tokens to the host's copy, which doubles when it is full."""
        end = self.length + block.shape[1]
        if end > self._sampled.shape[1]:
            self._sampled = np.pad(self._sampled, ((0, 0), (0, end)))
        self._sampled[:, self.length : end] = block
        self.length = end

    def _finish(self, candidate: Candidate, tokens: np.ndarray, end: End) -> None:
        candidate.tokens, candidate.end = tokens.copy(), end
        self.finished.append(candidate)


def prompt_chunk() -> Chunk:
    """Prompt tokens in one forward pass."""
    return Chunk("prompt tokens", PREFILL_CHUNK)


@torch.inference_mode()
def prefill(
    model: Transformer, ops: Ops, cache: PagedKV, prompt_ids: Sequence[int], chunk: Chunk
) -> torch.Tensor:
    """Compute the prompt's KV into the cache's prompt buffer; returns `[prompt, hidden]`."""
    ids = torch.as_tensor(np.asarray(prompt_ids, dtype=np.int64)).to(model.device)
    hidden: list[torch.Tensor] = []

    def forward() -> None:
        part = ids[cache.prompt_len : cache.prompt_len + chunk.size]
        hidden.append(model.extend(ops, part, pack(cache, [len(part)], to_prompt=True)))

    while cache.prompt_len < len(ids):
        chunk.retrying(forward, len(ids) - cache.prompt_len)
        cache.prompt_len += len(hidden[-1])
    return torch.cat(hidden)
