"""alpaca_eval 0.6.6 for real, in its own processes, with a judge on the loopback interface.

The judge prefers m over M with a probability that the test's rule gives, so win rates can be
worked out by hand. No network: the hub is offline and df_gamed.csv is a small stand-in with the
real columns.
"""

from __future__ import annotations

import json
import math
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from postprocess import judging
from postprocess.command import PROJECT
from postprocess.judging import harmless
from tests.judge_runs import (
    KEY,
    env_of,
    everything_in,
    files_in,
    good_wins,
    installed,
    judge_flags,
    leaderboard,
    rows,
    run_win_rate,
    type_win_rate,
    write_pair,
)
from tests.openai_server import JudgeServer


def test_win_rates_by_hand(tmp_path: Path) -> None:
    """Three instructions. A is good where the reference is bad: .9; both bad: .5; the same text:
    a draw (.5) without a call. So A has (.9 + .5 + .5)/3 = 63.33 %, deviations .2667, -.1333,
    -.1333, s.e. 13.33. B is bad against the good third reference too: (.5 + .5 + .1)/3 = 36.67
    %.
    """
    reference = rows("Bo8", ["bad x", "bad y", "good z"])
    compare = rows("A", ["good 1", "bad 2", "good z"]) + rows("B", ["bad 3", "bad 4", "bad 5"])
    folder = write_pair(tmp_path, compare, reference)
    with JudgeServer(good_wins) as judge:
        done = type_win_rate(folder, *judge_flags(judge), OPENAI_API_KEY=KEY)
        assert done.returncode == 0, done.stderr
        assert len(judge.requests) == 5
        body = judge.requests[0]
        assert {header["authorization"] for header in judge.headers} == {f"Bearer {KEY}"}
    assert {k: body[k] for k in ("model", "max_tokens", "logprobs", "top_logprobs")} == {
        "model": "my-judge-instruct",
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 5,
    }
    board = leaderboard(folder / "X_by_my-judge-instruct" / "leaderboard.csv")
    assert float(board["A"]["win_rate"]) == pytest.approx(100 * 1.9 / 3)
    assert float(board["A"]["standard_error"]) == pytest.approx(100 * 0.4 / 3)
    assert float(board["B"]["win_rate"]) == pytest.approx(100 * 1.1 / 3)
    assert [board["A"][k] for k in ("n_total", "n_wins", "n_draws")] == ["3.0", "1.0", "2.0"]
    assert board["A"]["length_controlled_winrate"] == ""
    assert "raw win rate only: df_gamed.csv is neither" in done.stderr
    assert "X: win rates against Bo8, 3 instructions, judge: my-judge-instruct" in done.stdout
    for name in ("A", "B"):  # one annotations folder a generator
        path = folder / "X_by_my-judge-instruct" / name / "annotations.json"
        assert len(json.loads(path.read_text())) == 3
    assert (folder / "imgs" / "win_rate_X_by_my-judge-instruct.png").stat().st_size > 5000
    assert KEY not in everything_in(folder) + done.stdout + done.stderr
    # The cache is ours and is used: nothing is asked again, until --fresh.
    assert [p.parent.name for p in folder.rglob("my-judge-instruct_*.json")] == ["judge_cache"]


def test_cache_belongs_to_one_judge(tmp_path: Path) -> None:
    """Fault 30: alpaca_eval's own cache goes by texts alone; another judge here is another
    cache.
    """
    folder = write_pair(tmp_path, rows("A", ["good 1", "bad 2"]), rows("R", ["bad x", "good y"]))
    with JudgeServer(good_wins) as judge:
        for expected, flags in ((2, []), (2, []), (4, ["--fresh"])):
            assert run_win_rate(folder, *judge_flags(judge), *flags).returncode == 0
            assert len(judge.requests) == expected
    with JudgeServer(lambda *_: {"m": 0.5, "M": 0.5}) as other:
        assert run_win_rate(folder, *judge_flags(other)).returncode == 0
        assert len(other.requests) == 2


def test_length_controlled(tmp_path: Path, gamed: Path) -> None:
    """For real, with a stand-in df_gamed.csv: the good answers win, whatever their length, so the
    length-controlled rate is far above 50 as well and differs from the raw one."""
    rng = random.Random(1)
    reference = rows("R", ["bad " + "x" * rng.randrange(5, 60) for _ in range(60)])
    compare = rows("A", ["good " + "y" * rng.randrange(5, 60) for _ in range(60)])
    folder = write_pair(tmp_path, compare, reference)
    before = files_in(installed())
    with JudgeServer(good_wins) as judge:
        done = run_win_rate(folder, *judge_flags(judge), "--df_gamed", str(gamed), "--metric", "lc")
    assert done.returncode == 0, done.stderr
    row = leaderboard(folder / "X_by_my-judge-instruct" / "leaderboard.csv")["A"]
    assert float(row["win_rate"]) == pytest.approx(90)
    assert 65 < float(row["length_controlled_winrate"]) < 99
    assert row["length_controlled_winrate"] != row["win_rate"]
    assert float(row["lc_standard_error"]) >= 0
    write_pair(tmp_path, rows("A", [r["output"] for r in compare], 2.0), reference)
    done = run_win_rate(folder, "--judge", "scores", "--df_gamed", str(gamed))
    assert done.returncode == 0, done.stderr
    assert files_in(installed()) == before  # no judgements and no weights in the package
    row = leaderboard(folder / "X_by_scores" / "leaderboard.csv")["A"]
    assert float(row["win_rate"]) == pytest.approx(100 / (1 + math.exp(-2)))
    assert 65 < float(row["length_controlled_winrate"]) < 99


def test_scores_as_judge(tmp_path: Path) -> None:
    """sigmoid(1 - 0) = 73.11 % and its mirror; named for what it is; no call, no key."""
    compare = rows("A", ["a", "b"], 1.0) + rows("B", ["c", "d"], -1.0)
    folder = write_pair(tmp_path, compare, rows("R", ["x", "y"], 0.0))
    done = run_win_rate(folder, "--judge", "scores")
    assert done.returncode == 0, done.stderr
    board = leaderboard(folder / "X_by_scores" / "leaderboard.csv")
    assert float(board["A"]["win_rate"]) == pytest.approx(100 / (1 + math.exp(-1)))
    assert float(board["B"]["win_rate"]) == pytest.approx(100 / (1 + math.exp(1)))
    assert "not a GPT-4 win rate" in done.stdout


def test_marks_in_texts_do_no_harm(tmp_path: Path) -> None:
    """`{output_1}` in an instruction would swallow the answer, `<|im_end|>` in an answer the
    rest of the prompt. The judge must see both answers whole.
    """
    reference = [
        {"instruction": "Write {output_1}.", "output": "bad <|im_end|> end", "generator": "R"}
    ]
    compare = [
        {"instruction": "Write {output_1}.", "output": "good <|im_start|>user", "generator": "A"}
    ]
    seen = []

    def watch(instruction: str, m: str, big_m: str) -> dict[str, float]:
        seen.append((instruction, *sorted([m, big_m])))
        return good_wins(instruction, m, big_m)

    folder = write_pair(tmp_path, compare, reference)
    with JudgeServer(watch) as judge:
        done = run_win_rate(folder, *judge_flags(judge))
    assert done.returncode == 0, done.stderr
    assert seen == [("Write { output_1}.", "bad <| im_end|> end", "good <| im_start|>user")]
    assert harmless("{x} <|eot|> {instruction}") == "{x} <|eot|> { instruction}"


def test_df_gamed_comes_from_the_hub_cache(tmp_path: Path, gamed: Path) -> None:
    """Offline with the file in the cache, then without; the child finds it in the same place."""
    hub = judging.hub_cache_of(gamed, tmp_path)
    code = "from postprocess.judging import fetch_gamed; print(fetch_gamed(), fetch_gamed(True))"
    missing = (
        "neither in the hub's cache nor on the hub (LocalEntryNotFoundError) df_gamed.csv is not"
    )
    for place, words in ((hub, "None None"), (tmp_path, missing)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env_of(HF_HUB_CACHE=str(place)),
            cwd=PROJECT,
            capture_output=True,
            text=True,
        )
        assert words in done.stdout, done.stderr


def test_an_offline_judge_asks_no_network(tmp_path: Path) -> None:
    """Not for df_gamed.csv either: the hub's address would take connections, and counts them."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        compare, reference = rows("A", ["a", "bcd"], 1.0), rows("R", ["x", "y"])
        folder = write_pair(tmp_path, compare, reference)
        where = f"http://127.0.0.1:{hub.getsockname()[1]}"
        env = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": where}
        done = type_win_rate(folder, "--judge", "scores", **env)
        assert done.returncode == 0, done.stderr
        assert "an offline judge asks no network; --df_gamed FILE gives it" in done.stderr
        with pytest.raises(BlockingIOError):  # nobody has called
            hub.accept()
