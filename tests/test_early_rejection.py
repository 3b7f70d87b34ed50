"""The early rejection experiment, small: what it measures, that it resumes, and its table."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks import early_plot, early_rejection
from benchmarks.early_summary import summarise
from postprocess.pool import Pool
from suite.settings import Settings

PLAIN = "rows=12 alpha=0.5 schedule=halving min_tokens=8"
REFILL = "rows=8 alpha=0.5 schedule=halving min_tokens=8 refill"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "three.json"
    texts = ("Why?", "How so?", "When, and where?")
    path.write_text(json.dumps([{"JSON_idx": i, "prompt": t} for i, t in enumerate(texts)]))
    return path


@pytest.fixture(scope="module")
def command(tiny_models, prompts):
    return [
        "--data_filename", str(prompts), "--model_dir", str(tiny_models),
        "--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward",
        "--max_tokens", "200", "--max_gen_tokens", "48", "--pool", "16", "--lengths", "8,16,32",
    ]  # fmt: skip


def lines_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_it_measures_and_resumes(command, tmp_path, capsys):
    out = ["--out", str(tmp_path), "--log"]
    first = [*command, *out, "--num_prompts", "2", "--config", PLAIN, "--no_rehearsal"]
    assert early_rejection.main(first) == 0
    capsys.readouterr()
    before = lines_of(tmp_path)
    assert [(x["JSON_idx"], x["config"]) for x in before] == [
        (0, "pool"), (0, PLAIN), (1, "pool"), (1, PLAIN)
    ]  # fmt: skip
    assert early_rejection.main([*command, *out, "--config", PLAIN, "--config", REFILL]) == 0
    printed = capsys.readouterr().out
    after = lines_of(tmp_path)
    assert after[:4] == before, "what was done is not done again"
    assert len(after) == 3 * 3
    assert json.loads(printed.splitlines()[-1])["num_prompts"] == 3
    check_lines(tmp_path, after)


def check_lines(folder, lines):
    """z from the pool's own files; Speculative Rejection's rows are members of the pool."""
    files = sorted((folder / "pool").glob("*.json"))
    assert len(files) == 3
    for idx, path in enumerate(files):
        (item,) = json.loads(path.read_text())
        scores = {t["candidate"]: t["score"] for t in item["trajectories"]}
        assert "token_ids" not in item["trajectories"][0]
        values = np.array(list(scores.values()))
        mine = {x["config"]: x for x in lines if x["JSON_idx"] == idx}
        assert mine["pool"]["best_score"] == max(values)
        assert mine["pool"]["best_of"]["16"][0] == pytest.approx(
            (max(values) - values.mean()) / values.std()
        )
        for name in (PLAIN, REFILL):
            line = mine[name]
            z = (line["best_score"] - values.mean()) / values.std()
            assert line["z"] == pytest.approx(z)
            assert line["tokens_generated"] > 0 and line["best_perplexity"] > 1
        assert min(abs(values - mine[PLAIN]["best_score"])) < 1e-5
        assert mine[REFILL]["num_forks"] > 0 == mine[PLAIN]["num_forks"]


def test_the_picture(tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    lines = [line for idx in range(3) for line in made_up(idx, 1.0 + idx / 10, 8)]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert early_plot.main([str(results), "--out", str(tmp_path / "imgs")]) == 0
    assert "rows=2 x" in capsys.readouterr().out
    for kind in ("png", "pdf"):
        assert (tmp_path / "imgs" / f"early_rejection.{kind}").stat().st_size > 5000
    results.write_text("")
    assert early_plot.main([str(results), "--out", str(tmp_path / "none")]) == 1


def test_the_time_budget_ends_it(command, tmp_path, capsys):
    argv = [*command, "--out", str(tmp_path), "--config", PLAIN, "--max_seconds", "0.001"]
    assert early_rejection.main(argv) == 0
    assert "run again to go on" in capsys.readouterr().out
    assert len({x["JSON_idx"] for x in lines_of(tmp_path)}) == 1


def test_mistakes_are_one_line(command, tmp_path, capsys):
    for config, said in (
        ("rows=8 hourly", "hourly"),
        ("alpha=0.5", "rows=N is missing"),
        ("rows=8 head", "--value_head"),
    ):
        argv = [*command, "--out", str(tmp_path), "--config", config]
        assert early_rejection.main(argv) == 2
        assert said in capsys.readouterr().err


def test_every_default_configuration_is_understood():
    for text in early_rejection.CONFIGS:
        config = early_rejection.Config.parse(text, Settings())
        assert config.settings.speculative_rejection
        assert config.uses_head == text.endswith("head")
    assert early_rejection.Config.parse(PLAIN, Settings()).settings.init_batch_size == 12


# ---- the table ---------------------------------------------------------------------------------


def made_up(idx, z, tokens):
    """A pool of 4 whose Best-of-n costs 20 n tokens, and a configuration with this z and cost."""
    pool = Pool(np.array([0.0, 1.0, 2.0, 3.0]), np.full(4, 10), np.full(4, 10))
    base = {"generation_sec": 1.0, "reward_sec": 0.5, "best_tokens": 10, "best_perplexity": 5.0}
    return [
        {"JSON_idx": idx, "config": "pool", "n": 4, "mean_tokens": 10.0, "logged": False,
         "best_of": {str(n): pool.best_of(n) for n in (1, 2, 4)},
         "tokens_generated": 40, "tokens_scored": 40, **base},
        {"JSON_idx": idx, "config": "rows=2 x", "z": z, "log_n_eq": math.log(4.0),
         "tokens_generated": tokens, "tokens_scored": tokens, **base, "generation_sec": 0.25},
    ]  # fmt: skip


def summary_of(lines, names=("pool", "rows=2 x")):
    text, numbers = summarise(lines, names)
    return text, {row["name"]: row for row in numbers.get("rows", [])}, numbers


def test_saving_at_equal_reward():
    """Best-of-2 of 0, 1, 2, 3: the six pairs have maxima 1 2 3 2 3 3, so E max = 7/3."""
    z = (7 / 3 - 1.5) / math.sqrt(1.25)
    _, rows, _ = summary_of([*made_up(0, z, 8), *made_up(1, z, 8)])
    row = rows["rows=2 x"]
    assert row["saving"] == pytest.approx(40 / 16)
    assert row["saving_sign"] == ""
    assert row["pool_over_its_tokens"] == pytest.approx(80 / 16)
    assert row["n_eq"] == pytest.approx(4.0)
    assert row["seconds"] == 0.75
    assert rows["Best-of-4"]["seconds"] == 1.5


def test_above_the_pools_best_the_saving_is_a_bound():
    text, rows, _ = summary_of([*made_up(0, 3.0, 8), *made_up(1, 3.0, 8)])
    assert (rows["rows=2 x"]["saving_sign"], rows["rows=2 x"]["saving"]) == (">=", 80 / 16)
    assert ">=5.00" in text


def test_prompts_that_lack_a_configuration_do_not_count():
    text, _, numbers = summary_of([*made_up(0, 1.0, 8), *made_up(1, 1.0, 8)[:1]])
    assert numbers["num_prompts"] == 1
    assert summary_of(made_up(0, 1.0, 8)[:1])[2] == {"num_prompts": 0}


def test_cost_at_the_pools_reward_is_interpolated_between_rows():
    top = 1.5 / math.sqrt(1.25)  # the pool's best
    lines = []
    for idx in range(2):
        pool, low = made_up(idx, top - 0.5, 10)
        high = {**made_up(idx, top + 0.5, 40)[1], "config": "rows=8 x"}
        lines += [pool, low, high]
    _, _, numbers = summary_of(lines, ("pool", "rows=2 x", "rows=8 x"))
    (family,) = numbers["families"]
    assert family["name"] == "x"
    assert family["tokens"] == pytest.approx(math.sqrt(20 * 80))
    assert family["tokens_saved"] == pytest.approx(80 / 40)
