"""win_rate.py with judges, files and flags that are wrong: a message and a code, no rate."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from postprocess import judging, win_rate
from postprocess.judging import Job, environment, forget_failures, redact
from tests.judge_runs import (
    KEY,
    everything_in,
    good_wins,
    judge_flags,
    leaderboard,
    rows,
    run_win_rate,
    write_pair,
)
from tests.openai_server import JudgeServer

REFERENCE = rows("R", ["x", "yy", "zzz"])
FAULTS = [
    (
        "holds 2 generators",
        rows("A", ["a", "b", "c"]),
        REFERENCE[:2] + rows("Q", ["", "", "q"])[2:],
    ),
    ("A: 1 instructions stand twice", rows("A", ["a", "b", "c"]) + rows("A", ["d"]), REFERENCE),
    (
        "the reference: 1 instructions stand twice",
        rows("A", ["a", "b", "c"]),
        REFERENCE + REFERENCE[:1],
    ),
    ("0 instructions are not in the reference, 1 are missing", rows("A", ["a", "b"]), REFERENCE),
    ("1 instructions are not in the reference, 0 are missing", rows("A", list("abcd")), REFERENCE),
    ("A: 1 empty outputs, the first for Say 1.", rows("A", ["a", " ", "c"]), REFERENCE),
    ("every output is a number", rows("A", ["1", "2.5", "-3"]), REFERENCE),
    ("every generator is a number", rows("17", ["a", "b", "c"]), REFERENCE),
    ("the reference R is among the compared", rows("R", ["a", "b", "c"]), REFERENCE),
    ("not fit for a folder's name", rows("../x", ["a", "b", "c"]), REFERENCE),
]


def test_judge_that_drops_answers_fails(tmp_path: Path) -> None:
    """Neither m nor M: alpaca_eval leaves the row out silently. We fail, and ask again next
    time.
    """
    folder = write_pair(tmp_path, rows("A", ["a 1", "b 2", "c 3"]), rows("R", ["x", "y", "z"]))

    def mute(instruction: str, m: str, big_m: str) -> dict[str, float]:
        return {"Both": 1.0} if instruction == "Say 1." else {"m": 0.5, "M": 0.5}

    board = folder / "X_by_my-judge-instruct" / "leaderboard.csv"
    with JudgeServer(mute) as judge:
        done = run_win_rate(folder, *judge_flags(judge))
        assert done.returncode == 1
        assert "A: 2 of 3 answers judged; the judge gave neither m nor M" in done.stderr
        assert not board.exists()
        judge.rule = good_wins
        assert run_win_rate(folder, *judge_flags(judge)).returncode == 0
        assert len(judge.requests) == 4
        assert leaderboard(board)["A"]["n_total"] == "3.0"
        judge.rule = mute
        assert run_win_rate(folder, *judge_flags(judge), "--fresh").returncode == 1
    assert not board.exists()  # the earlier one must not pass for this


def test_judge_out_of_order(tmp_path: Path) -> None:
    """A dead judge is an error with its reason, without the key that it sent back; 429 is waited
    for.
    """
    folder = write_pair(tmp_path, rows("A", ["a 1", "b 2"]), rows("R", ["x", "y"]))
    with JudgeServer(good_wins, statuses=(400,) * 20) as judge:
        done = run_win_rate(folder, *judge_flags(judge), OPENAI_API_KEY=KEY)
        assert done.returncode == 1
        assert "alpaca_eval failed (exit code 1): openai.BadRequestError" in done.stderr
        assert "Traceback" not in done.stderr
        log = (folder / "X_by_my-judge-instruct" / "judge.log").read_text()
        assert "the judge is out of order, key Bearer [key]" in log
        assert KEY not in everything_in(folder) + done.stdout + done.stderr
    with JudgeServer(good_wins, statuses=(429,)) as judge:
        assert run_win_rate(folder, *judge_flags(judge)).returncode == 0
        assert len(judge.requests) == 3
    with JudgeServer() as gone:
        pass
    assert run_win_rate(folder, *judge_flags(gone), "--fresh").returncode == 1


def test_other_addresses_do_not_win(tmp_path: Path) -> None:
    """Fault 31: OPENAI_CLIENT_CONFIG_PATH and the rest must not turn --judge_url aside."""
    folder = write_pair(tmp_path, rows("A", ["a 1", "b 2"]), rows("R", ["x", "y"]))
    with JudgeServer(good_wins) as judge, JudgeServer(good_wins) as wrong:
        clients = tmp_path / "clients.yaml"
        clients.write_text(f"default:\n- api_key: x\n  base_url: {wrong.url}\n")
        done = run_win_rate(
            folder,
            *judge_flags(judge),
            OPENAI_CLIENT_CONFIG_PATH=str(clients),
            OPENAI_API_BASE=wrong.url,
            OPENAI_BASE_URL=wrong.url,
        )
        assert done.returncode == 0, done.stderr
        assert (len(judge.requests), len(wrong.requests)) == (2, 0)
        # Without --judge_url the environment decides, as alpaca_eval documents it.
        flags = ["--judge", "openai", "--fresh"]
        done = run_win_rate(folder, *flags, OPENAI_API_KEY=KEY, OPENAI_API_BASE=wrong.url)
        assert done.returncode == 0, done.stderr
        assert {body["model"] for body in wrong.requests} == {"gpt-4-1106-preview"}


@pytest.mark.parametrize(("words", "compare", "reference"), FAULTS)
def test_checks_come_before_any_judge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: str, compare: list, reference: list
) -> None:
    """Fault 28 and its like. The address is dead: a call would be another error."""
    folder = write_pair(tmp_path, compare, reference)
    code = win_rate.main(
        ["--out", str(folder), "--judge_url", "http://127.0.0.1:9/v1", "--judge_model", "x"]
    )
    assert code == 1
    assert words in caplog.text
    assert not list(folder.glob("X_by_*"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("want a JSON list of answers", '{"instruction": "x"}'),
        ("not valid JSON", '{"instruction": "x"}\n{"instruction": "y"}'),
        ("row 0: output is missing", '[{"instruction": "x", "generator": "A"}]'),
        ("row 0: generator is missing", '[{"instruction": "x", "output": "A"}]'),
        ("row 0: instruction is missing", '[{"output": "x", "generator": "A"}]'),
    ],
)
def test_files_that_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any, words: str, text: str
) -> None:
    folder = write_pair(tmp_path, [], REFERENCE)
    (folder / "X_compare.json").write_text(text)
    assert win_rate.main(["--out", str(folder), "--judge", "scores"]) == 1
    assert words in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "compare", "reference"),
    [
        ("one instruction", rows("A", ["a"]), rows("R", ["xyz"])),
        ("806 instructions, it knows at most 805", rows("A", ["a"] * 806), rows("R", ["xy"] * 806)),
        (
            "A: every answer differs in length by -1",
            rows("A", ["a", "bb"]),
            rows("R", ["xy", "xyz"]),
        ),
    ],
)
def test_length_controlled_has_limits(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    gamed: Path,
    words: str,
    compare: list,
    reference: list,
) -> None:
    """Fault 29: said before the judge is asked."""
    folder = write_pair(tmp_path, compare, reference)
    flags = ["--judge", "scores", "--metric", "lc", "--df_gamed", str(gamed), "--out", str(folder)]
    assert win_rate.main(flags) == 1
    assert words in caplog.text


def test_df_gamed_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_pair(tmp_path, rows("A", ["a", "bb"]), rows("R", ["xy", "z"]))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    base = ["--judge", "scores", "--metric", "lc", "--out", str(folder)]
    assert win_rate.main([*base, "--df_gamed", str(tmp_path / "other.csv")]) == 1
    assert "not alpaca_eval's df_gamed.csv, columns index" in caplog.text
    assert win_rate.main([*base, "--df_gamed", str(tmp_path / "gone.csv")]) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--judge_url", "http://127.0.0.1:9/v1"],
        ["--judge_url", "ftp://x/v1", "--judge_model", "m"],
        ["--judge_url", "http://user:secret@x/v1", "--judge_model", "m"],
        ["--judge", "reward", "--judge_model", "m"],
    ],
)
def test_bad_command_lines(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        win_rate.main(["--out", str(tmp_path), *flags])
    assert caught.value.code == 2


def test_no_judge_is_named(tmp_path: Path) -> None:
    folder = write_pair(tmp_path, rows("A", ["a", "bb"]), rows("R", ["xy", "z"]))
    done = run_win_rate(folder)
    assert done.returncode == 2
    assert "no judge: set OPENAI_API_KEY, or give --judge_url" in done.stderr


def test_secrets() -> None:
    assert redact("a sk-1234567 b sk-1234567", ["sk-1234567", "", "none"]) == "a [key] b [key]"
    job = Job("c", "r", "f", False, judge_url="http://x/v1", judge_model="m")
    own = {"OPENAI_API_KEYS": "a,b", "OPENAI_BASE_URL": "http://y", "PATH": "p"}
    env = environment(job, KEY, None, own)
    assert env["OPENAI_API_KEY"] == KEY
    assert not {"OPENAI_API_KEYS", "OPENAI_BASE_URL"} & env.keys()
    offline = Job("c", "r", "f", False, preferences={})
    assert "OPENAI_API_KEY" not in environment(offline, None, None, {"OPENAI_API_KEY": KEY})


def test_the_child_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """judging.py in this process: by a judge, and by preferences (1.25 and 1.75, so 50 %)."""
    write_pair(tmp_path, rows("A", ["good 1", "bad 2"]), rows("R", ["bad x", "bad {output_1}"]))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    places = (str(tmp_path / "X_compare.json"), str(tmp_path / "X_ref.json"), str(tmp_path / "o"))
    with JudgeServer(good_wins) as judge:
        asked = {"judge_url": judge.url, "judge_model": "j", "annotator": "j"}
        jobs = [
            Job(*places, False, cache=str(tmp_path / "cache.json"), **asked),
            Job(*places, False, annotator="p", preferences={"A": [1.25, 1.75]}),
        ]
        found = []
        for job in jobs:
            (tmp_path / "job.json").write_text(json.dumps(asdict(job)))
            assert judging.main([str(tmp_path / "job.json")]) == 0
            found += json.loads((tmp_path / "o" / "metrics.json").read_text())
        assert len(judge.requests) == 2
    assert [row["win_rate"] for row in found] == pytest.approx([70, 50])
    assert [row["avg_length"] for row in found] == [5.5, 5.5]


def test_failed_judgements_are_forgotten(tmp_path: Path) -> None:
    cache = tmp_path / "c.json"
    forget_failures(cache)
    texts = dict.fromkeys(judging.CACHE_KEYS, "a text")
    cache.write_text(json.dumps([{**texts, "preference": p} for p in (1.5, -1, None)]))
    forget_failures(cache)
    assert json.loads(cache.read_text()) == [{**texts, "preference": 1.5}]
    cache.write_text(json.dumps([{**texts, "preference": -1}]))
    forget_failures(cache)
    assert not cache.exists()
