"""Memory as arithmetic: how many rows start, how far they go, who gets which bytes.

The budget is what is left of the memory after both models' weights, the buffers of their prompts
and the workspace of the largest forward passes. It is cut once, into pages of the generator's cache
and of the reward model's. Nothing here touches a device: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import ModelConfig

FIRST_STRETCH_TOKENS = 64  # answer tokens of the first round: fewer say little about an answer
REWARD_PAGE_SIZE = 2  # small: an answer's last page is seldom full
# Relative costs, from benchmarks/LOG.md: a decoded token to a read one of the same model; and a
# GPU's step of no rows, in rows: weights are read all the same, small models are bound by launches.
DECODE_TO_READ = 1.2
GPU_STEP_ROWS, GPU_LAUNCH_ROW_PARAMS = 90, 6e10


class DoesNotFit(ValueError):
    """Not even one row fits; the message says how much is missing and which flag helps."""


@dataclass(frozen=True, slots=True)
class Side:
    """One model's memory: its config, the bytes of a value, the longest prompt.

    `end_tokens` are what a template puts behind an answer, cached until they have been read.
    """

    config: ModelConfig
    bytes_per_value: int
    max_prompt: int
    end_tokens: int = 0

    @property
    def token_bytes(self) -> int:
        return self.config.kv_bytes_per_token(self.bytes_per_value)

    @property
    def prompt_bytes(self) -> int:
        return self.max_prompt * self.token_bytes


@dataclass(frozen=True, slots=True)
class Round:
    """A scoring to plan with: the answers' length, and the share of the first rows still there."""

    length: int | float
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The cut of the budget. Bytes are bytes, sizes are tokens."""

    budget_bytes: int
    page_size: int
    pages: int  # of the generator's cache
    reward_pages: int  # of the reward model's, 0 where nothing is kept
    keep_reward_cache: bool
    why: str
    max_rows: int
    max_answer_tokens: int
    generator_kv_bytes: int
    reward_kv_bytes: int
    reward_max_prompt: int = 1
    read_chunk_tokens: int = 0  # that one forward pass reads at the most
    weight_bytes: int = 0
    workspace_bytes: int = 0
    predicted_peak_bytes: int = 0
    recorded_steps: int = 0  # numbers of rows that a GPU records a step for
    recording_sec: float = 0.0  # predicted for all of them
    generator_params: int = 0
    reward_params: int = 0

    def rows_for(self, answer_tokens: int) -> int:
        """Rows that fit when each has this many answer tokens."""
        return min(self.max_rows, self.pages // pages_for(answer_tokens, self.page_size))


def gigabytes(num_bytes: int) -> str:
    """In GB, to the megabyte; fewer bytes than that to the byte."""
    return f"{num_bytes / 1e9:.{3 if abs(num_bytes) >= 10**6 else 9}f}"


def enough_gigabytes(num_bytes: int) -> str:
    """The same, rounded up: who gives what is named gives enough."""
    unit = 10**6 if num_bytes >= 10**6 else 10 ** max(0, len(str(num_bytes)) - 3)
    return gigabytes((num_bytes // unit + 1) * unit)


def pages_for(answer_tokens: int, page_size: int) -> int:
    """Pages of one row; the last sampled token never needs a place in the cache."""
    return max(1, -(-(answer_tokens - 1) // page_size))


def first_stretch(page_size: int, max_answer_tokens: int) -> int:
    """Answer tokens that the first rows have room for: whole pages, the sampled token on top."""
    stretch = -(-FIRST_STRETCH_TOKENS // page_size) * page_size + 1
    return min(stretch, max_answer_tokens)


def make_plan(
    budget_bytes: int,
    generator: Side,
    reward: Side | None,
    *,
    page_size: int,
    max_answer_tokens: int,
    max_rows: int | None = None,
    alpha: float | None = None,
    rounds: Sequence[Round] | None = None,
    reward_cache: str = "auto",
    step_rows: float = 0.0,
    chunk_tokens: int = 0,
) -> Plan:
    """Cut `budget_bytes` of memory for answers' keys and values.

    `alpha` is None for Best-of-N, where each answer is read once and keeping what was read is of
    no use. `rounds` are those of a schedule; without them memory makes the rounds. `step_rows` is
    what a decode step costs before its first row, in rows, `chunk_tokens` what one pass reads.
    Raises DoesNotFit where one row at full length does not fit.
    """
    share, keep, why = 1.0, False, "nothing to keep: each answer is read once"
    if reward is not None and alpha is not None:
        share = _generator_share(budget_bytes, generator, reward, page_size, chunk_tokens)
        keep, why = _choose(
            budget_bytes,
            generator,
            reward,
            share,
            [] if alpha == 0.0 else rounds or memory_rounds(alpha, max_answer_tokens),
            max_answer_tokens,
            max_rows if rounds else None,
            reward_cache,
            step_rows,
        )
    page_bytes = page_size * generator.token_bytes
    own_bytes = int(budget_bytes * share) if keep else budget_bytes
    pages = max(0, own_bytes) // page_bytes
    needed = pages_for(max_answer_tokens, page_size)
    if pages < needed:
        # Without the reward's cache there may be room; the caller's choice is not overridden.
        missing = int((needed * page_bytes) / (share if keep else 1.0)) - budget_bytes
        raise DoesNotFit(
            f"one row of {max_answer_tokens} answer tokens does not fit: the KV budget is "
            f"{gigabytes(budget_bytes)} GB and {enough_gigabytes(missing)} GB more are needed; "
            "give a larger --kv_cache_gb or --gpu_memory_utilization, or a smaller --max_tokens or "
            "--max_gen_tokens"
        )
    first_pages = pages_for(first_stretch(page_size, max_answer_tokens), page_size)
    rows = min(pages // first_pages, max_rows or pages)
    reward_pages = 0
    if keep:
        reward_bytes = REWARD_PAGE_SIZE * reward.token_bytes
        reward_pages = (budget_bytes - own_bytes) // reward_bytes
    return Plan(
        budget_bytes=budget_bytes,
        page_size=page_size,
        pages=pages,
        reward_pages=reward_pages,
        keep_reward_cache=keep,
        why=why,
        max_rows=rows,
        max_answer_tokens=max_answer_tokens,
        generator_kv_bytes=generator.prompt_bytes + (pages + 1) * page_bytes,
        reward_kv_bytes=_reward_bytes(reward, reward_pages),
        reward_max_prompt=reward.max_prompt if reward else 1,
        read_chunk_tokens=chunk_tokens,
        generator_params=generator.config.num_params,
        reward_params=reward.config.num_params if reward else 0,
    )


def _reward_bytes(reward: Side | None, pages: int) -> int:
    if reward is None:
        return 0
    return reward.prompt_bytes + (pages + 1) * REWARD_PAGE_SIZE * reward.token_bytes


def _generator_share(
    budget_bytes: int, generator: Side, reward: Side, page_size: int, chunk_tokens: int
) -> float:
    """The generator's share of a shared budget, such that both caches are full together.

    The first stretch decides: there the token that was sampled last weighs most in the reward
    model's pages. The ends of turns take their place behind the answers of one pass at a time.
    """
    stretch = first_stretch(page_size, 1 << 60) - 1
    read = pages_for(stretch + 2, REWARD_PAGE_SIZE) * REWARD_PAGE_SIZE
    own, other = stretch * generator.token_bytes, read * reward.token_bytes
    end_pages = pages_for(reward.end_tokens + 1, REWARD_PAGE_SIZE) if reward.end_tokens else 0
    end, budget = end_pages * REWARD_PAGE_SIZE * reward.token_bytes, max(1, budget_bytes)
    rows = min(budget / (own + other + end), max(1, chunk_tokens) / stretch)
    return own / (own + other) * (1 - rows * end / budget)


def _choose(
    budget_bytes: int,
    generator: Side,
    reward: Side,
    share: float,
    rounds: Sequence[Round],
    max_answer: int,
    max_rows: int | None,
    wish: str,
    step_rows: float,
) -> tuple[bool, str]:
    """Keep what the reward model read, or read again? By predicted time a candidate.

    Without its cache the reward model reads every text of a round from its start. Keeping starts
    fewer candidates in the same memory, who then share the cost of each step.
    """
    if wish != "auto":
        return wish == "on", f"--reward_cache {wish}"
    if not rounds:
        return False, "nothing is cut, so each answer is read once"
    lengths = [0, *(r.length for r in rounds)]
    grown = sum(r.share * (r.length - before) for r, before in zip(rounds, lengths, strict=False))
    whole = sum(r.share * r.length for r in rounds)  # tokens a candidate, read from the start
    room = max(1.0, budget_bytes / (FIRST_STRETCH_TOKENS * generator.token_bytes))
    kept_rows, again_rows = (min(rows, max_rows or rows) for rows in (room * share, room))
    steps = step_rows * max_answer  # what all steps cost by themselves; each row has its part
    params, read = generator.config.num_layer_params, reward.config.num_layer_params
    decode = DECODE_TO_READ * params
    kept = decode * (grown + steps / kept_rows) + read * grown
    again = decode * (grown + steps / again_rows) + read * whole
    better = "keeping" if kept < again else "reading again"
    ratio = max(kept, again) / min(kept, again)
    return kept < again, f"{better} is predicted {ratio:.2f} times faster over {len(rounds)} rounds"


def gpu_step_rows(config: ModelConfig) -> float:
    """What a decode step costs on a GPU before its first row, in rows."""
    return GPU_STEP_ROWS + GPU_LAUNCH_ROW_PARAMS / config.num_layer_params


def memory_rounds(alpha: float, max_answer: int) -> list[Round]:
    """The rounds of full memory: each leaves 1 - alpha of the rows, who then grow to fill it."""
    rounds = [Round(FIRST_STRETCH_TOKENS, 1.0)]
    while rounds[-1].length < max_answer and len(rounds) < 64:
        last = rounds[-1]
        rounds.append(Round(last.length / (1 - alpha), last.share * (1 - alpha)))
    return rounds
