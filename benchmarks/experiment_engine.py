"""Runs a configuration of the experiment on a prompt: models loaded once, caches by kind of memory.

All kinds of memory live side by side in one process, so that changing the method costs nothing.
Answers stay token ids; only a winner's text is decoded. Seconds leave out the recording of CUDA
graphs (`capture_sec` is stored beside them). It decides nothing about the order or the files.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiment_plan import Config, Size, kv_bytes, memory_settings
from engine import memory
from engine.config import ModelConfig
from engine.weights import load_model
from generator import Generator, PromptFailed
from rewards.loading import load_reward_model
from suite.assembly import Assembly, put_together
from suite.backend import DTYPES, PAGE_SIZE, device_name, versions
from suite.chat import Chat, generator_chat
from suite.models import resolve
from suite.processes import Processes
from suite.progress import Progress
from suite.prompts import Prompt
from suite.records import RunFolder
from suite.run_plan import longest_answer_of
from suite.settings import Settings, output_folder

log = logging.getLogger("experiment")

SHARE_FOR_POOLS = 0.95  # of what is free beside the other caches; the rest is workspace
SPARE_BYTES = 6_000_000_000  # graphs and the largest forward passes of every kind of memory

Item = dict[str, Any]


class IdsOnly:
    """A Chat that leaves answers as ids: thousands of texts a prompt that nobody reads."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.prompt_ids = chat.prompt_ids

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        return [""] * len(answers)


class Engine:
    """The loaded models and the memory of every configuration."""

    def __init__(self, base: Settings, size: Size, configs: Sequence[Config]) -> None:
        self.size = size
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.processes = Processes(0, 1, device)
        dtype = DTYPES[base.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
        where = base.model_dir, base.local_files_only
        source = resolve(base.llm_name, *where, role="generator")
        folder = source.ready()
        config = ModelConfig.from_folder(folder)
        tokens = longest_answer_of(base, config)
        self.just_fit_bytes = kv_bytes(
            config, dtype.itemsize, PAGE_SIZE[device.type], size.fit_rows, tokens
        )
        kinds = {config.memory: config for config in configs}
        self._check_fit(kinds, config.num_params * dtype.itemsize)
        self.chat = generator_chat(folder, source.name, base.prompt_template)
        self.model, _ = load_model(folder, dtype, device)
        judge = resolve(base.reward_model_name, *where, role="reward")
        self.judge = load_reward_model(judge, dtype, device)
        self.parts: dict[str, Assembly] = {}
        self.kv_cache_gb: dict[str, float] = {}
        self._allocate(kinds)

    def _may_run_in_waves(self, kind: str) -> bool:
        """A GPU's pools take what is left of its memory, where that is less than they want."""
        return self.processes.device.type == "cuda" and kind.endswith("pool")

    def _check_fit(self, kinds: Mapping[str, Config], weight_bytes: int) -> None:
        """Before the weights load: ValueError for caches that this device could never hold."""
        device = self.processes.device
        most = (memory.total_bytes(device) - weight_bytes) / 1e9
        for name, config in kinds.items():
            wanted = memory_settings(config, self.size, self.just_fit_bytes).kv_cache_gb
            if wanted > most and not self._may_run_in_waves(name):
                raise ValueError(
                    f"the caches of {config.name!r} must fit beside the generator's weights in the "
                    f"{most:.3g} GB that this device ({device.type}) has left, got {wanted:.4g} "
                    "GB; lower --fit_rows, --pool, --self_pool or --max_gen_tokens"
                )

    def _allocate(self, kinds: Mapping[str, Config]) -> None:
        """The caches of every kind of memory, the pools last."""
        for name in sorted(kinds, key=lambda name: (name.endswith("pool"), name == "pool")):
            settings = memory_settings(kinds[name], self.size, self.just_fit_bytes)
            if self._may_run_in_waves(name):
                free = memory.free_bytes(self.processes.device) - SPARE_BYTES
                limit = free * SHARE_FOR_POOLS / 1e9
                if settings.kv_cache_gb > limit:
                    log.warning(
                        "%s: %.1f GB wanted, %.1f free: the pool runs in waves",
                        name,
                        settings.kv_cache_gb,
                        limit,
                    )
                    settings = dataclasses.replace(settings, kv_cache_gb=limit)
            judge = None if settings.self_reward else self.judge
            parts = put_together(settings, self.chat, self.model, judge)
            self.parts[name] = dataclasses.replace(parts, chat=IdsOnly(self.chat))
            self.kv_cache_gb[name] = settings.kv_cache_gb

    def run(self, config: Config, prompt: Prompt) -> list[Item]:
        """One object for each block. Raises PromptFailed."""
        return [self._run_block(config, prompt, seed) for seed in config.blocks]

    def _run_block(self, config: Config, prompt: Prompt, seed: int) -> Item:
        parts = self.parts[config.memory]
        settings = dataclasses.replace(
            config.settings,
            seed=seed,
            kv_cache_gb=self.kv_cache_gb[config.memory],
            save_token_ids=True,
        )
        item = Generator(settings, self.processes, parts).run(prompt, Progress(1, speaks=False))
        if "skipped" in item:
            raise PromptFailed(item["skipped"])
        item["page_bytes"] = parts.decoder.cache.page_bytes
        return item

    def rehearse(self, config: Config, prompt: Prompt) -> None:
        """Eight rows, so that kernels compile and libraries wake outside of what is measured."""
        few = dataclasses.replace(config.settings, max_batch_size=8, batch_size=8)
        self._run_block(dataclasses.replace(config, settings=few), prompt, 0)

    def text_of(self, trajectory: dict[str, Any]) -> str:
        return self.chat.decode([_answer_ids(trajectory)])[0]

    def store(self, folder: Path, config: Config, prompt: Prompt, item: Item) -> None:
        """The whole object with every text, in an ordinary run folder."""
        settings = dataclasses.replace(
            config.settings, kv_cache_gb=self.kv_cache_gb[config.memory], save_token_ids=False
        )
        name = output_folder(settings, 1).name
        settings = dataclasses.replace(settings, output_folder=f"{folder.name}/{name}")
        texts = self.chat.decode([_answer_ids(t) for t in item["trajectories"]])
        plain = [
            {**{k: v for k, v in t.items() if k != "token_ids"}, "output": text}
            for t, text in zip(item["trajectories"], texts, strict=True)
        ]
        named = {"save_token_ids": False, "output_folder": settings.output_folder}
        with RunFolder(folder / name, settings, 1) as run:
            run.open()
            run.write(prompt, [{**item, **named, "trajectories": plain}])

    def description(self) -> dict[str, Any]:
        """What the log needs: device, versions, memory."""
        return {
            "device": device_name(self.processes.device),
            "versions": versions(),
            "just_fit_bytes": self.just_fit_bytes,
            "memory": {
                name: {
                    "kv_cache_gb": self.kv_cache_gb[name],
                    "rows_at_full_length": parts.plan.rows_for(parts.plan.max_answer_tokens),
                    "pages": parts.plan.pages,
                    "page_size": parts.plan.page_size,
                    "keeps_reward_cache": parts.plan.keep_reward_cache,
                    "predicted_peak_bytes": parts.plan.predicted_peak_bytes,
                }
                for name, parts in self.parts.items()
            },
        }


def _answer_ids(trajectory: dict[str, Any]) -> list[int]:
    """Without the stop token, which is no part of the text."""
    ids = trajectory["token_ids"]
    return ids[:-1] if trajectory["finish_reason"] == "stop" else ids
