"""Fixtures that several test files share: tiny model folders, written once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("suite", deadline=None)  # a busy machine is no fault of an example
settings.load_profile("suite")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `--model_dir` folder with `tiny-llama` (chat template) and `tiny-reward` in it."""
    from tests.tiny import make_tiny_llama, make_tiny_reward

    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "tiny-llama")
    make_tiny_reward(folder / "tiny-reward")
    return folder


@pytest.fixture
def search(tiny_models: Path):
    """`search(alpha=0.5, kv_pages=24, ...)`: a run of a method on the tiny models, its object."""
    from functools import partial

    from tests.search import run_search

    return partial(run_search, tiny_models)
