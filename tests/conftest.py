"""Fixtures that several test files share: tiny model folders, runs on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from tests.tiny_runs import MODELS, prompt_file

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
    from tests.search import run_search

    return partial(run_search, tiny_models)


@pytest.fixture
def cli(
    tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs `main.main` in this process, into `tmp_path/out`; gives exit code and stderr."""
    import main

    def call(*flags: str) -> tuple[int, str]:
        given = [*MODELS, "--model_dir", str(tiny_models), "--output_folder", str(tmp_path / "out")]
        try:
            code = main.main([*given, *flags])
        except SystemExit as e:
            code = e.code
        return code, capsys.readouterr().err

    return call


@pytest.fixture
def small_cli(cli: Callable[..., tuple[int, str]], tmp_path: Path) -> Callable:
    """The same, two candidates of eight tokens to each of three prompts."""
    flags = prompt_file(tmp_path, "first", "second", "third")
    return partial(cli, *flags, "--max_gen_tokens", "8", "--batch_size", "2")


@pytest.fixture
def flags(tiny_models: Path, tmp_path: Path) -> list[str]:
    """Flags of a small run into `tmp_path/out`."""
    where = ["--model_dir", str(tiny_models), "--output_folder", str(tmp_path / "out")]
    return [*MODELS, *where, "--batch_size", "2"]


@pytest.fixture(scope="session")
def gamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for df_gamed.csv, which win_rate.py and alpaca_eval read."""
    from tests.judge_runs import write_gamed

    return write_gamed(tmp_path_factory.mktemp("gamed") / "df_gamed.csv")
