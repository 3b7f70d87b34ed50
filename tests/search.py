"""Runs a method on the tiny models in this process, with memory in pages; scripted rewards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from suite.settings import Settings

PROMPT = "Why is the sky blue?"
MAX_ANSWER = 96


def run_search(
    models: Path,
    *,
    kv_pages: int | None = None,
    prompt: str = PROMPT,
    json_idx: int = 7,
    reward: str = "tiny-reward",
    head: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """The object that the generator returns. `kv_pages` is the generator's cache in pages."""
    from generator import Generator
    from suite.assembly import assemble
    from suite.processes import Processes
    from suite.progress import Progress
    from suite.prompts import Prompt

    small = dict(
        model_dir=str(models),
        llm_name="tiny-llama",
        reward_model_name=reward,
        max_tokens=300,
        max_gen_tokens=MAX_ANSWER,
        speculative_rejection="log_partial" not in changes and "batch_size" not in changes,
        save_token_ids=True,
    )
    settings = Settings(**{**small, **changes})
    processes = Processes(0, 1, torch.device("cpu"))
    parts = assemble(settings, processes)
    if kv_pages is not None:
        shrink(parts, kv_pages)
    record = {"JSON_idx": json_idx, "prompt": prompt}
    generator = Generator(settings, processes, parts, head)
    return generator.run(Prompt(json_idx, prompt, record), Progress(1, speaks=False))


def shrink(parts: Any, pages: int) -> None:
    """Take pages away from the generator's cache, as a smaller budget would."""
    cache = parts.decoder.cache
    assert pages <= cache.num_pages
    cache._num_free -= cache.num_pages - pages
    cache._free = cache._free[cache.num_pages - pages :].copy()
    cache.num_pages = pages
    parts.plan = dataclasses.replace(parts.plan, pages=pages)


def short_is_best(prompt: str, answers: list[str]) -> list[float]:
    """Answers of fewer than 8 characters score 10 and more, which no text that goes on keeps."""
    return [10 + 1 / (1 + len(a)) if len(a) < 8 else len(a) % 7 / 100 for a in answers]
