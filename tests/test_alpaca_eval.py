"""The README's line for alpaca_eval 0.6.6, with a judge on the loopback interface."""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postprocess import judging, merge_json
from tests.judge_runs import KEY, env_of, files_in, good_wins, installed, rows
from tests.openai_server import JudgeServer

# The user's own alpaca_eval command line.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed package: the plain line caches judgements and weights inside it."""
    target = tmp_path_factory.mktemp("site")
    shutil.copytree(installed(), target / "alpaca_eval")
    return target


def alpaca_eval(folder: Path, site: Path, judge: JudgeServer, hub: Path, *flags: str) -> Any:
    """The contract's line on the files of merge_json.py."""
    line = [str(Path(sys.executable).with_name("alpaca_eval")), "make_leaderboard"]
    line += ["--leaderboard_path", "leader_board.csv"]
    line += ["--all_model_outputs", "win_rate/X_compare.json"]
    line += ["--reference_outputs", "win_rate/X_ref.json", "--output_path", "leader_board"]
    line += [
        "--fn_metric",
        "get_length_controlled_winrate",
        "--sort_by",
        "length_controlled_winrate",
    ]
    env = env_of(
        PYTHONPATH=str(site), OPENAI_API_KEY=KEY, OPENAI_API_BASE=judge.url, HF_HUB_CACHE=str(hub)
    )
    return subprocess.run(
        [*line, "--is_overwrite_leaderboard", *flags],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def merged_pair(folder: Path) -> None:
    """60 instructions through merge_json.py, two methods and a base."""
    rng = random.Random(2)
    for name, word in (("Bo4", "bad"), ("SpR_alpha_0.5", "good"), ("Bo8", "poor")):
        found = [
            {
                **row,
                "JSON_idx": place,
                "llm": "L",
                "reward": "R",
                "seed": 0,
                "output": f"{word} {'x' * rng.randrange(5, 60)}",
            }
            for place, row in enumerate(rows(name, [""] * 60))
        ]
        (folder / "results").mkdir(parents=True, exist_ok=True)
        (folder / "results" / f"{name}.json").write_text(json.dumps(found))
    assert merge_json.main([str(folder / "results"), "--out", str(folder / "win_rate")]) == 0
    for kind in ("compare", "ref"):
        (folder / "win_rate" / f"L_R_{kind}.json").rename(folder / "win_rate" / f"X_{kind}.json")


def test_the_users_own_line(tmp_path: Path, site: Path, gamed: Path) -> None:
    """Fault 27: the contract's line judges all, writes all and exits 1 in its last print. With
    the three flags of the README it exits 0, and nothing is kept inside the package.
    """
    merged_pair(tmp_path)
    hub = judging.hub_cache_of(gamed, tmp_path)
    own = files_in(site)
    readme = ["--is_return_instead_of_print", "--caching_path", "judgements.json"]
    readme += ["--metric_kwargs", "{'save_weights_dir': None}"]
    with JudgeServer(good_wins) as judge:
        done = alpaca_eval(tmp_path, site, judge, hub, *readme)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(judge.requests) == 120
    assert files_in(site) == own
    with (tmp_path / "leader_board.csv").open() as file:
        board = {row[""]: row for row in csv.DictReader(file)}
    assert float(board["SpR_alpha_0.5"]["win_rate"]) == pytest.approx(90)
    assert float(board["Bo4"]["win_rate"]) == pytest.approx(50)
    assert {row["n_total"] for row in board.values()} == {"60"}
    (tmp_path / "leader_board.csv").unlink()
    with JudgeServer(good_wins) as judge:
        done = alpaca_eval(tmp_path, site, judge, hub)
        assert done.returncode == 1
        assert "unexpected keyword argument 'leaderboard_mode'" in done.stderr
        assert len(judge.requests) == 120
    with (tmp_path / "leader_board.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2
    assert files_in(site) > own


def test_alpaca_eval_imports() -> None:
    """Fault 26: setuptools 82 took pkg_resources away; the pinned one has it."""
    code = "import alpaca_eval, pkg_resources"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env_of(), capture_output=True
    )
    assert done.returncode == 0, done.stderr
