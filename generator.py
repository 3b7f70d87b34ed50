"""The generator: a prompt in, this process's JSON object out, by one of the METHODS.

The shared life of a prompt is methods/session.py; a method is a function of it, registered here.
Adding one never edits main.py. What a value head and the sidecar of hidden states need beyond the
session is here too.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine import memory
from engine.candidates import Candidate
from methods.best_of_n import best_of_n
from methods.session import PromptFailed, Session
from methods.speculative import speculative_rejection
from rewards.value_head import HEAD_SHA256, ValueHead, load_value_head
from suite.hidden import join, states_path, write_states
from suite.settings import Settings, base_name, output_folder, settings_for_record

if TYPE_CHECKING:
    from suite.assembly import Assembly
    from suite.processes import Processes
    from suite.progress import Progress
    from suite.prompts import Prompt

__all__ = ["METHODS", "Generator", "PromptFailed", "build", "stream_key"]

log = logging.getLogger(__name__)
METHODS: dict[str, Callable[[Session], None]] = {
    "best_of_n": best_of_n,
    "speculative_rejection": speculative_rejection,
}


class Generator:
    """Runs one method on one prompt after the other, on this process."""

    def __init__(
        self,
        settings: Settings,
        processes: Processes,
        parts: Assembly,
        head: ValueHead | None = None,
    ) -> None:
        self.settings, self.processes, self.parts, self.head = settings, processes, parts, head
        self._recorded = settings_for_record(settings)  # now: a value head's file may be replaced
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
        unfit = self._unfit(prompt_ids)
        if unfit:
            return {**self._head(prompt, start), "skipped": unfit}
        session = Session(
            settings=self.settings,
            parts=self.parts,
            prompt=prompt.prompt,
            prompt_ids=prompt_ids,
            stream_key=stream_key(self.process_seed, prompt.json_idx, prompt.prompt),
            max_length=min(self.parts.plan.max_answer_tokens, self._bound - len(prompt_ids)),
            progress=progress,
            head=self.head,
        )
        self._find_answers(session)
        with session.phase("text: decode"):
            trajectories = self._trajectories(session)
        if self.settings.log_hidden:
            self._write_states(prompt, session)
        return {
            **self._head(prompt, start),
            "clock": session.clock,
            "trajectories": trajectories,
            "rejected": session.rejected,
            "failed_rows": session.failed,
            "rounds": session.rounds,
            **self._truncated(prompt),
            **self._partials(session),
            "num_prompt_tokens": len(prompt_ids),
            "tokens_generated": self.parts.decoder.tokens_generated,
            "tokens_scored": self.parts.reward.tokens_read,
            **self.parts.measured(),
        }

    def _truncated(self, prompt: Prompt) -> dict[str, Any]:
        """Candidates whose answer the reward model could not read to its end, where there are."""
        found = sorted(self.parts.reward.truncated)
        if not found:
            return {}
        text = (
            "prompt %d: %d answers are longer than the reward model reads; their ends don't count"
        )
        log.warning(text, prompt.json_idx, len(found))
        return {"reward_truncated": found}

    def _find_answers(self, session: Session) -> None:
        """The method's work; memory that no smaller chunk can save fails this prompt alone."""
        try:
            self.method(session)
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            raise PromptFailed(
                f"out of memory: {memory.in_words(error)}; lower --kv_cache_gb, "
                "--gpu_memory_utilization or --max_tokens"
            ) from error

    @property
    def _bound(self) -> int:
        """Tokens of prompt and answer together."""
        return min(self.settings.max_tokens, self.parts.decoder.model.config.max_positions)

    def _unfit(self, prompt_ids: Sequence[int]) -> str | None:
        """Why a prompt of these tokens can't be run, if so."""
        if not prompt_ids:
            return "the prompt has no tokens: its tokenizer adds none, and there is nothing in it"
        if len(prompt_ids) < self._bound:
            return None
        return (
            f"the prompt has {len(prompt_ids)} tokens and the bound of prompt and answer is "
            f"{self._bound}; raise --max_tokens"
        )

    def _head(self, prompt: Prompt, start: float) -> dict[str, Any]:
        return {
            **self._recorded,
            "process_seed": self.process_seed,
            "process_rank": self.processes.rank,
            "num_processes": self.processes.world_size,
            "prompt": prompt.record,
            "elapsed_sec": time.perf_counter() - start,
            "clock": [],
            "trajectories": [],
        }

    def _partials(self, session: Session) -> dict[str, Any]:
        """What `--log_partial` adds: scores by length, and what replay needs to count tokens."""
        if not self.settings.log_partial:
            return {}
        prompt, end = self.parts.reward.fixed_tokens()
        return {
            "partials": session.partials,
            "reward_prompt_tokens": prompt,
            "reward_end_tokens": end,
        }

    def _write_states(self, prompt: Prompt, session: Session) -> None:
        """The sidecar of hidden states, before the JSON file that it belongs to."""
        s = self.settings
        names = base_name(s.llm_name), base_name(s.reward_model_name)
        folder = output_folder(s, self.processes.world_size)
        beside = folder / f"{'_'.join(names)}_prompt_{prompt.json_idx:04d}.json"
        number = self.processes.rank if s.parallel == "candidates" else 0
        write_states(
            states_path(beside, number),
            join(session.states, self.parts.reward.hidden_size),
            {
                "llm_name": names[0],
                "reward_model_name": names[1],
                HEAD_SHA256: self.parts.reward.head_sha256,
            },
        )

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


def build(settings: Settings, processes: Processes) -> Generator:
    """Load the models, plan the memory, say the plan. Raises ValueError on a user's mistake."""
    head = None
    if settings.value_head is not None:
        head = load_value_head(settings.value_head)
        head.check(base_name(settings.reward_model_name), None)

    from suite.assembly import assemble

    parts = assemble(settings, processes)
    if head is not None:
        reward = parts.reward
        name = base_name(settings.reward_model_name)
        head.check(name, reward.hidden_size, reward.head_sha256)
    return Generator(settings, processes, parts, head)
