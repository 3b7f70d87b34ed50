"""What the paper's experiment consists of: configurations, their order, and the memory they get.

A configuration is one way to answer a prompt; its results are one line a prompt in one of FILES.
The order puts what is worth most first: in chunks of prompts, the pool of Best-of-N and every alpha
of the first seed, then timing, self-reward and the side questions, then the other seeds; so a run
that is stopped leaves whole tables over fewer prompts. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.config import ModelConfig
from engine.plan import pages_for
from suite.settings import Settings

POOL, SELF_POOL, PARTIAL = "pool", "self pool", "partial"
FILES = ("pool", "rejection", "timing", "self_reward", "partial")
GROWING = ("timed_prompts", "side_prompts")  # more of them only add lines
EXTENT = (*GROWING, "chunk_prompts")  # how many prompts, in what order: no line depends on them


@dataclass(frozen=True, slots=True)
class Size:
    """How large the experiment is. The defaults are the paper's, on one GPU."""

    pool: int = 3840  # candidates of Best-of-N, from which every smaller N is taken
    block: int = 3840  # candidates drawn by one process seed, at once
    fit_rows: int = 120  # full-length rows that fit in Speculative Rejection's memory
    alphas: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    seeds: tuple[int, ...] = (0, 1)
    timed_prompts: int = 10
    side_prompts: int = 20  # self-reward, partial scores, the reward model's cache
    self_pool: int = 960
    self_alphas: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    again_alphas: tuple[float, ...] = (0.5,)
    chunk_prompts: int = 25

    def __post_init__(self) -> None:
        for name in ("pool", "block", "fit_rows", "self_pool", "chunk_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("timed_prompts", "side_prompts"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be at least 0, got {getattr(self, name)}")
        for name in ("alphas", "seeds", "self_alphas", "again_alphas"):
            given = [f"{value:g}" for value in getattr(self, name)]
            if not given and name in ("alphas", "seeds"):
                raise ValueError(f"--{name} must be one or more, got none")
            if len(set(given)) < len(given):
                raise ValueError(f"--{name} must hold none twice, got {' '.join(given)}")
        if self.pool % self.block:
            raise ValueError(
                f"--pool must be a multiple of --block, got {self.pool} and {self.block}; "
                "120 and 3840 candidates are the paper's"
            )
        for alpha in (*self.alphas, *self.self_alphas, *self.again_alphas):
            if not 0 < alpha < 1:
                raise ValueError(f"alphas must lie between 0 and 1, got {alpha}")

    @property
    def packed_sizes(self) -> list[int]:
        """Best-of-N beyond one wave whose seconds are measured apart: 240, 480, ...

        The pool measures itself, unless it is drawn in smaller blocks.
        """
        sizes, n = [], 2 * self.fit_rows
        while n < self.pool:
            sizes.append(n)
            n *= 2
        return sizes if self.block == self.pool else [*sizes, self.pool]

    @property
    def shown_sizes(self) -> list[int]:
        """Best-of-N in the tables."""
        return sorted({n for n in (self.fit_rows, *self.packed_sizes, self.pool) if n <= self.pool})


@dataclass(frozen=True, slots=True)
class Config:
    """One way to answer a prompt; `memory` names the caches that it runs in."""

    name: str
    file: str
    memory: str
    settings: Settings
    blocks: tuple[int, ...] = (0,)  # process seeds, one run each
    first_prompts: int | None = None  # only so many prompts

    def wants(self, position: int) -> bool:
        return self.first_prompts is None or position < self.first_prompts


def rejection_name(alpha: float, seed: int) -> str:
    return f"alpha {alpha:g} seed {seed}"


def other_cache(reward_cache: str) -> str:
    """What the side question forces beside the main runs' `reward_cache`."""
    return "off" if reward_cache == "on" else "on"


def again_name(alpha: float, reward_cache: str) -> str:
    """The side question's runs, beside main runs with this `reward_cache`."""
    what = {"off": "read again", "on": "cache kept"}[other_cache(reward_cache)]
    return f"alpha {alpha:g} {what}"


def self_name(alpha: float) -> str:
    return f"self alpha {alpha:g}"


def wave_name(seed: int) -> str:
    return f"wave seed {seed}"


def packed_name(n: int) -> str:
    return f"packed {n}"


def groups(size: Size, base: Settings) -> list[list[Config]]:
    """The configurations, those worth most first; a group is done for a chunk of prompts."""
    first, *others = size.seeds
    whole = replace(base, speculative_rejection=False, seed=0, reward_cache="auto")
    pool = Config(
        POOL,
        "pool",
        "pool",
        replace(whole, batch_size=size.block),
        blocks=tuple(range(size.pool // size.block)),
    )
    main = [pool, *(_rejection(size, base, alpha, first) for alpha in size.alphas)]
    more = [[_rejection(size, base, alpha, seed) for alpha in size.alphas] for seed in others]
    return [main, _timing(size, whole), _self_reward(size, base), _side(size, base), *more]


def _rejection(size: Size, base: Settings, alpha: float, seed: int) -> Config:
    settings = replace(base, speculative_rejection=True, alpha=alpha, seed=seed)
    return Config(rejection_name(alpha, seed), "rejection", "shared", settings, (seed,))


def _timing(size: Size, whole: Settings) -> list[Config]:
    """Two waves as large as memory of `fit_rows` holds, and Best-of-N packed whole."""
    names = {wave_name(seed): (size.fit_rows, seed) for seed in (0, 1)}
    names |= {packed_name(n): (n, 0) for n in size.packed_sizes}
    return [
        Config(
            name,
            "timing",
            "pool",
            replace(whole, batch_size=n, seed=seed),
            (seed,),
            size.timed_prompts,
        )
        for name, (n, seed) in names.items()
    ]


def _self_reward(size: Size, base: Settings) -> list[Config]:
    own = replace(base, reward_model_name=base.llm_name)
    pool = replace(own, speculative_rejection=False, batch_size=size.self_pool, reward_cache="auto")
    made = [Config(SELF_POOL, "self_reward", "self pool", pool, (0,), size.side_prompts)]
    for alpha in size.self_alphas:
        settings = replace(own, speculative_rejection=True, alpha=alpha)
        name = self_name(alpha)
        made.append(Config(name, "self_reward", "self shared", settings, (0,), size.side_prompts))
    return made if size.self_alphas else []


def _side(size: Size, base: Settings) -> list[Config]:
    """Partial scores of candidates that nobody cuts; and the reward model's cache the other way."""
    lengths = [n for n in (16, 32, 64, 128, 256, 512) if n < base.max_gen_tokens]
    partial = replace(
        base,
        speculative_rejection=False,
        batch_size=size.fit_rows,
        reward_cache="auto",
        log_partial=",".join(map(str, lengths)) or None,
    )
    made = [Config(PARTIAL, "partial", "partial", partial, (0,), size.side_prompts)]
    cache = other_cache(base.reward_cache)
    for alpha in sorted({*size.again_alphas} & {*size.alphas}):  # others have no twin to compare
        name = again_name(alpha, base.reward_cache)
        main = _rejection(size, base, alpha, size.seeds[0])
        settings = replace(main.settings, reward_cache=cache)
        made.append(Config(name, "rejection", "other", settings, main.blocks, size.side_prompts))
    return made


def tasks(
    ordered: Sequence[Sequence[Config]], num_prompts: int, chunk: int
) -> Iterator[tuple[int, Config]]:
    """(place of the prompt, configuration) in the order of the run."""
    for start in range(0, num_prompts, chunk):
        for group in ordered:
            for position in range(start, min(start + chunk, num_prompts)):
                for config in group:
                    if config.wants(position):
                        yield position, config


def kv_bytes(model: ModelConfig, value_bytes: int, page_size: int, rows: int, tokens: int) -> int:
    """Bytes of the generator's cache in which `rows` rows of `tokens` answer tokens just fit."""
    token_bytes = model.kv_bytes_per_token(value_bytes)
    return rows * pages_for(tokens, page_size) * page_size * token_bytes


def memory_settings(config: Config, size: Size, just_fit_bytes: int) -> Settings:
    """Settings to plan a kind of memory with, `kv_cache_gb` included.

    `just_fit_bytes` holds `fit_rows` rows of full length. Speculative Rejection has exactly that,
    shared with the reward model's cache where one is kept. The pools have what they need.
    """
    gigabytes = {
        "pool": just_fit_bytes * size.pool / size.fit_rows,
        "self pool": just_fit_bytes * size.self_pool / size.fit_rows,
        "partial": 3 * just_fit_bytes,  # the reward model's pages are smaller but more
    }
    wanted = gigabytes.get(config.memory, just_fit_bytes)
    rows = {"pool": size.pool, "self pool": size.self_pool}
    return replace(
        config.settings,
        batch_size=rows.get(config.memory, config.settings.batch_size),
        kv_cache_gb=(wanted + 1) / 1e9,  # + 1: rounding must not cost a page
    )
