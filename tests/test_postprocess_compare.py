"""The comparison on a two-prompt archive; the numbers are worked out in the comments.

See make_archive: base Bo8 has ranges 4 and 4, 20 s on 2 GPUs = 40 GPU s.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from postprocess import gather_best_ans, plot_compare
from postprocess.runs import load_runs
from postprocess.stats import (
    Bound,
    Weights,
    bootstrap,
    choose_weights,
    compare,
    envelope,
    equal_score_compute,
    score_ranges,
    spearman,
    speedup,
)
from tests.postprocess_archive import PAIR, make_archive, make_object, speculative, write_run
from tests.test_postprocess_reading import paper_object


def rows_of(folder: Path, pair: str = PAIR) -> dict[str, dict[str, str]]:
    with (folder / f"{pair}.csv").open() as file:
        return {row["method"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("compare")
    archive = make_archive(folder / "archive")
    assert plot_compare.main([str(archive), "--out", str(folder / "imgs")]) == 0
    pictures = sorted(path.name for path in (folder / "imgs").iterdir())
    assert pictures == [f"{PAIR}.csv", f"{PAIR}.pdf", f"{PAIR}.png"]
    assert (folder / "imgs" / f"{PAIR}.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "imgs" / f"{PAIR}.pdf").read_bytes().startswith(b"%PDF")
    return rows_of(folder / "imgs")


@pytest.mark.parametrize(
    ("method", "score", "seconds", "time", "gpu"),
    [
        ("Bo8", 100, 20, 1, 1),
        ("Bo4", 75, 10, 0.5, 0.25),
        ("SpR_alpha_0.5", 87.5, 5, 0.25, 0.125),
        ("SpR_alpha_0.9", 112.5, 10, 0.5, 0.25),
        ("SpR_alpha_0.1", 25, 4, 0.2, 0.1),
    ],
)
def test_score_and_compute(
    table: dict, method: str, score: float, seconds: float, time: float, gpu: float
) -> None:
    row = table[method]
    found = [
        float(row[key]) for key in ("score", "seconds", "relative_time", "relative_gpu_compute")
    ]
    assert found == pytest.approx([score, seconds, time, gpu])
    assert row["prompts"] == "2"


def test_phases_tokens_and_memory(table: dict) -> None:
    """Half of the seconds are generation, a quarter reward (make_object). Bo8: 2 prompts x 2
    objects x (100, 200) tokens; peak of rank 1 is 2 GiB. Weighted: Bo8 4 x (100 x 1000 + 200 x
    500) = 800,000; Bo4 half of it; SpR 2 x (50 x 1000 + 60 x 500) = 160,000.
    """
    row = table["Bo8"]
    assert (row["generation_sec"], row["reward_sec"]) == ("10.0", "5.0")
    assert (row["tokens_generated"], row["tokens_scored"]) == ("400.0", "800.0")
    assert row["peak_memory_bytes"] == str(2 * 2**30)
    relative = {name: float(row["relative_tokens"]) for name, row in table.items()}
    assert relative["Bo4"] == pytest.approx(0.5)
    assert relative["SpR_alpha_0.5"] == pytest.approx(0.2)


def test_speedups(table: dict) -> None:
    """Best-of-N points (GPU, score): (.25, 75), (1, 100). 87.5 lies half way: sqrt(.25 x 1) =
    .5, over .125 = 4. 112.5 is above all: >= 1/.25 = 4. 25 is below the first: <= .25/.1 = 2.5,
    not a value from the other end. By tokens (.5, 75), (1, 100): sqrt(.5)/.2 = 3.5355; >= 1/.2 =
    5; <= .5/.2 = 2.5.
    """

    def of(method: str) -> list[tuple[float, str]]:
        row = table[method]
        return [(float(row[f"speedup_{a}"]), row[f"speedup_{a}_bound"]) for a in ("gpu", "tokens")]

    half = of("SpR_alpha_0.5")
    assert half == [(pytest.approx(4), "="), (pytest.approx(math.sqrt(0.5) / 0.2), "=")]
    assert of("SpR_alpha_0.9") == [(pytest.approx(4), ">="), (pytest.approx(5), ">=")]
    assert of("SpR_alpha_0.1") == [(pytest.approx(2.5), "<="), (pytest.approx(2.5), "<=")]
    assert table["Bo4"]["speedup_gpu"] == ""


def test_interval_by_hand(table: dict) -> None:
    """SpR .9 has 125 and 100: a resample of two has mean 100, 112.5, 125 with chance 1/4, 1/2,
    1/4, so the 2.5 and 97.5 percentiles are its ends. Equal values have no width.
    """
    row = table["SpR_alpha_0.9"]
    assert (float(row["score_low"]), float(row["score_high"])) == (100, 125)
    row = table["SpR_alpha_0.5"]
    assert (float(row["score_low"]), float(row["score_high"])) == (87.5, 87.5)


def test_interval_is_of_95_percent() -> None:
    """Two ones in ten: a resample has k ones, k ~ Bin(10, .2); P(k <= 4) = .967 and P(k <= 5) =
    .994, so the 97.5 percentile is .5 (the 95th would be .4); P(0) = .107, so the low end is 0.
    Mirrored for eight ones.
    """
    values = np.array([1.0] * 2 + [0.0] * 8)
    assert bootstrap(values) == pytest.approx((0, 0.5))
    assert bootstrap(1 - values) == pytest.approx((0.5, 1))


def test_interval_covers_and_repeats() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(100):
        low, high = bootstrap(rng.normal(3, 1, 40)) or (0, 0)
        hits += low <= 3 <= high
    assert 86 <= hits <= 100
    values = rng.normal(size=30)
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values[:1]) is None


CURVE = [(0.25, 75.0), (1.0, 100.0)]


@pytest.mark.parametrize(
    ("points", "score", "expected"),
    [
        (CURVE, 75, Bound(0.25)),
        (CURVE, 100, Bound(1.0)),
        (CURVE, 87.5, Bound(0.5)),
        (CURVE, 100.1, Bound(1.0, ">=")),
        (CURVE, 74.9, Bound(0.25, "<=")),
        (CURVE[:1], 75, Bound(0.25)),
        (CURVE[:1], 80, Bound(0.25, ">=")),
        (CURVE[:1], 70, Bound(0.25, "<=")),
        ([], 70, None),
        # Noise: N = 480 scores below N = 240. The envelope skips it: between (.25, 75) and (1,
        # 100).
        ([(0.25, 75.0), (0.5, 70.0), (1.0, 100.0)], 87.5, Bound(0.5)),
        # The largest N is not the best: beyond the best point it is a lower bound at that point.
        ([(0.25, 75.0), (0.5, 90.0), (1.0, 80.0)], 95, Bound(0.5, ">=")),
        # Two points of one compute: the better stands.
        ([(0.25, 75.0), (0.25, 80.0), (1.0, 100.0)], 80, Bound(0.25)),
        ([(0.0, 10.0), (0.25, 75.0)], 5, Bound(0.25, "<=")),
    ],
)
def test_equal_score(points: list, score: float, expected: Bound | None) -> None:
    found = equal_score_compute(points, score)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.value, found.sign) == (pytest.approx(expected.value), expected.sign)


def test_equal_score_is_monotone() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = [(float(2.0**i), float(s)) for i, s in enumerate(rng.normal(size=6))]
        costs = [equal_score_compute(points, s) for s in np.linspace(-4, 4, 60)]
        values = [cost.value for cost in costs if cost is not None]
        assert values == sorted(values)
        assert len(envelope(points)) >= 1


def test_speedup_without_compute() -> None:
    assert speedup(CURVE, None, 80) is None
    assert speedup(CURVE, 0.0, 80) is None
    assert str(Bound(2.0, ">=")) == ">=2"


def test_zero_range_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 24: prompt 2's base scores are all 1. Prompt 1: (2 - 3)/(3 - 1) = -.5, score 50;
    times of prompt 1 alone, 4/8.
    """
    write_run(
        tmp_path,
        "base",
        {1: [make_object(1, [1, 2, 3], 8)], 2: [make_object(2, [1, 1, 1], 8)]},
    )
    write_run(tmp_path, "one", {1: [make_object(1, [2, 1], 4)], 2: [make_object(2, [9, 9], 4)]})
    assert plot_compare.main([str(tmp_path), "--out", str(tmp_path / "o")]) == 0
    row = rows_of(tmp_path / "o")["Bo2"]
    assert [float(row[k]) for k in ("prompts", "score", "relative_time")] == [1, 50, 0.5]
    assert "prompts with JSON_idx 2 left out, all scores of the base are equal" in caplog.text


def test_all_ranges_zero_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, "base", {1: [make_object(1, [1, 1, 1], 8)]})
    write_run(tmp_path, "one", {1: [make_object(1, [2, 1], 4)]})
    assert plot_compare.main([str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    assert "in no prompt do the scores differ" in caplog.text


def test_missing_prompts_are_paired_by_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 24: SpR has prompts 2 and 3, the base 1 and 2. Only 2: (1 - 2)/4 = -.25, 2 s of 8 s
    x 2.
    """
    archive = make_archive(tmp_path / "a")
    write_run(
        archive,
        "other",
        {idx: [make_object(idx, [1], 2, **speculative(0.3))] for idx in (2, 3)},
    )
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    row = rows_of(tmp_path / "o")["SpR_alpha_0.3"]
    keys = ("prompts", "score", "relative_time", "relative_gpu_compute")
    assert [float(row[k]) for k in keys] == [1, 75, 0.25, 0.125]
    assert (row["score_low"], row["score_high"]) == ("", "")
    spr, base = f"SpR_alpha_0.3_{PAIR}_0", f"Bo8_{PAIR}_0"
    assert f"{spr}: lacks prompts that {base} has, left out: JSON_idx 1\n" in caplog.text
    assert f"{base}: lacks prompts that {spr} has, left out: JSON_idx 3\n" in caplog.text
    assert "the methods do not have the same prompts" in caplog.text


def test_other_text_under_one_index_is_no_pair(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = make_archive(tmp_path / "a")
    prompts = {
        1: [make_object(1, [1], 2, **speculative(0.3))],
        2: [make_object(2, [1], 2, prompt={"JSON_idx": 2, "prompt": "?"}, **speculative(0.3))],
    }
    write_run(archive, "other", prompts)
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    assert rows_of(tmp_path / "o")["SpR_alpha_0.3"]["prompts"] == "1"
    assert "prompts with JSON_idx 2 are other texts" in caplog.text


def test_other_sampling_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Runs of other bounds are compared, for who knows why, but not silently."""
    archive = make_archive(tmp_path / "a")
    fields = speculative(0.3, max_tokens=99, kv_cache_gb=1.0)
    write_run(archive, "other", {1: [make_object(1, [1], 2, **fields)]})
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    named = [r.getMessage() for r in caplog.records if "other settings than" in r.getMessage()]
    assert named == [
        f"SpR_alpha_0.3_{PAIR}_0 was made with other settings than Bo8_{PAIR}_0: max_tokens"
        " (99 against 2048)"
    ]


def test_nothing_in_common(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = make_archive(tmp_path / "a")
    write_run(archive, "other", {9: [make_object(9, [1], 2, **speculative(0.3))]})
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    assert "SpR_alpha_0.3" not in rows_of(tmp_path / "o")
    assert "no prompt in common" in caplog.text


def test_single_point_gives_bounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 24, fewer than two points: SpR above the only Best-of-N: >= 1/(2/8) = 4."""
    write_run(tmp_path, "b", {1: [make_object(1, [1, 2], 8)]})
    write_run(tmp_path, "s", {1: [make_object(1, [3], 2, **speculative(0.5))]})
    assert plot_compare.main([str(tmp_path), "--out", str(tmp_path / "o")]) == 0
    row = rows_of(tmp_path / "o")["SpR_alpha_0.5"]
    assert (float(row["speedup_gpu"]), row["speedup_gpu_bound"]) == (4, ">=")
    assert "one Best-of-N point" in caplog.text


def test_no_best_of_n(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, "s", {1: [make_object(1, [3], 2, **speculative(0.5))]})
    assert plot_compare.main([str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    assert "no Best-of-N run to be the base" in caplog.text


def test_zero_seconds_divide_nothing(tmp_path: Path) -> None:
    """Times that a file does not know (0) give empty cells, not a crash."""
    write_run(tmp_path, "b", {1: [make_object(1, [1, 2, 3], 0)]})
    write_run(tmp_path, "c", {1: [make_object(1, [1, 2], 0)]})
    write_run(tmp_path, "s", {1: [make_object(1, [3], 0, **speculative(0.5))]})
    assert plot_compare.main([str(tmp_path), "--out", str(tmp_path / "o")]) == 0
    row = rows_of(tmp_path / "o")["SpR_alpha_0.5"]
    assert (row["relative_gpu_compute"], row["speedup_gpu"], row["score"]) == ("", "", "100.0")


def test_seeds_of_a_method_are_averaged(tmp_path: Path) -> None:
    """Prompt 1 (range 4): seeds give 3 and 2: -.25 and -.5, mean -.375. Prompt 2 (range 4, max
    2): 1 and 1: -.25. Score 100 (1 - .3125) = 68.75. Seconds 10 and 6: mean 8 of 20. The
    interval is over the two prompts' means, 62.5 and 75.
    """
    archive = tmp_path / "a"
    make_archive(archive)
    for seed, best, seconds in ((3, 3, 5), (4, 2, 3)):
        prompts = {
            1: [make_object(1, [best], seconds, seed=seed, **speculative(0.3))],
            2: [make_object(2, [1], seconds, seed=seed, **speculative(0.3))],
        }
        write_run(archive, f"s{seed}", prompts)
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    row = rows_of(tmp_path / "o")["SpR_alpha_0.3"]
    assert (row["seeds"], row["prompts"]) == ("3 4", "2")
    keys = ("score", "seconds", "relative_time", "score_low", "score_high")
    assert [float(row[k]) for k in keys] == pytest.approx([68.75, 8, 0.4, 62.5, 75])


def test_two_runs_of_one_method_and_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error with both folders, and plot_compare.py and gather_best_ans.py use the same one:
    the first by name, though the second has more prompts. Bo3 by 2 is 50, by 3 would be 75.
    """
    archive = make_archive(tmp_path / "a")
    for name, best, indices in (("one", 2, (1,)), ("two", 3, (1, 2))):
        objects = {idx: [make_object(idx, [0, 0, best], 5)] for idx in indices}
        write_run(archive, name, objects)
    said = f"{archive}/two: left out, {archive}/one has the same method, models and seed"
    for script in (plot_compare, gather_best_ans):
        caplog.clear()
        assert script.main([str(archive), "--out", str(tmp_path / "o")]) == 1
        assert [r.levelname for r in caplog.records if said in r.getMessage()] == ["ERROR"]
    assert float(rows_of(tmp_path / "o")["Bo3"]["score"]) == 50
    (row,) = json.loads((tmp_path / "o" / f"Bo3_{PAIR}_0.json").read_text())
    assert row["score"] == 2
    flags = [str(archive), "--out", str(tmp_path / "o"), "--base", "two"]
    assert plot_compare.main(flags) == 1
    assert f"{archive}/one: left out, {archive}/two has the same" in caplog.text
    assert rows_of(tmp_path / "o")["Bo3"]["prompts"] == "2"


def test_base_stands_alone(tmp_path: Path) -> None:
    """Another seed of the base's method does not move the base off (1, 100)."""
    archive = make_archive(tmp_path / "a")
    objects = [make_object(1, [9.0] * 4, 50, rank=r, seed=5) for r in range(2)]
    write_run(archive, "other seed", {1: objects})
    assert plot_compare.main([str(archive), "--out", str(tmp_path / "o")]) == 0
    row = rows_of(tmp_path / "o")["Bo8"]
    assert [row[k] for k in ("seeds", "score", "relative_gpu_compute")] == ["0", "100.0", "1.0"]


def test_base_and_methods_flags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive, out = str(make_archive(tmp_path / "a")), str(tmp_path / "o")
    flags = ["--base", "Bo4", "--methods", "SpR_alpha_0.5"]
    assert plot_compare.main([archive, "--out", out, *flags]) == 0
    rows = rows_of(tmp_path / "o")
    assert sorted(rows) == ["Bo4", "SpR_alpha_0.5"]
    # Against Bo4 (ranges 3 and 3): (3.5 - 3)/3 and (1.5 - 1)/3, score 100 (1 + 1/6); 5 s of 10.
    assert float(rows["SpR_alpha_0.5"]["score"]) == pytest.approx(100 * 7 / 6)
    assert float(rows["SpR_alpha_0.5"]["relative_gpu_compute"]) == 0.5
    assert plot_compare.main([archive, "--out", out, "--methods", "Bo", "SpR"]) == 0
    assert len(rows_of(tmp_path / "o")) == 5
    assert plot_compare.main([archive, "--out", out, "--methods", "X"]) == 1
    assert "none of --methods X; there is Bo4, Bo8" in caplog.text
    assert plot_compare.main([archive, "--out", out, "--base", "Bo5"]) == 1


def test_the_papers_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two objects are two GPUs; no tokens, so one panel; the finished row that stands twice moves
    nothing; NaN can't win. Bo: max 4, min 1. SpR: 3.25: -.25, 75 and 2 s x 1 of 8 s x 2 = .125."""
    names = ("Bo240_Gen_Rew_0", "SpR_alpha_0.5_Gen_Rew_0")
    objects = (
        [paper_object([1, 2], 8), paper_object([4, 3], 6)],
        [paper_object([3.25, math.nan, 3.25, 3.25], 2, speculative_rejection=True)],
    )
    for name, content in zip(names, objects, strict=True):
        (tmp_path / name).mkdir()
        for item in content:
            item |= {"llm_name": "Gen", "reward_model_name": "Rew"}
        (tmp_path / name / "Gen_Rew_prompt_0003.json").write_text(json.dumps(content))
    assert plot_compare.main([str(tmp_path), "--out", str(tmp_path / "o")]) == 0
    rows = rows_of(tmp_path / "o", "Gen_Rew")
    assert rows["Bo240"]["gpus"] == "2"
    row = rows["SpR_alpha_0.5"]
    assert [float(row[k]) for k in ("score", "relative_gpu_compute")] == [75, 0.125]
    assert (row["tokens_generated"], row["relative_tokens"], row["speedup_tokens"]) == ("", "", "")
    assert "1 of 4 trajectories ignored, no finite score" in caplog.text


def test_weights() -> None:
    """Parameters of the plan; silent or quarrelling files weigh every token the same."""
    archive = Path("unused")

    def run_with(*plans: dict | None):
        from postprocess.reading import summarise
        from postprocess.runs import Method, Run

        prompts = {}
        for idx, plan in enumerate(plans):
            item = make_object(idx, [1, 2], 1, plan=plan)
            path = archive / f"x_prompt_{idx:04d}.json"
            prompts[idx] = summarise(path, [item])
        return Run(archive, Method("Bo", n=2), "a", "b", 0, prompts)

    assert choose_weights([run_with({"generator_params": 7, "reward_params": 5})]) == Weights(7, 5)
    assert choose_weights([run_with({"generator_params": 7, "reward_params": 0})]) == Weights(7, 0)
    assert choose_weights([run_with(None)]) == Weights(1, 1)
    two = [{"generator_params": 7, "reward_params": 5}, {"generator_params": 8, "reward_params": 5}]
    assert choose_weights([run_with(*two)]) == Weights(1, 1)
    assert choose_weights([run_with({"generator_params": "x"})]) == Weights(1, 1)


def test_compare_needs_no_order_of_files(tmp_path: Path) -> None:
    runs = {run.method.name: run for run in load_runs([make_archive(tmp_path)])}
    base, method = runs["Bo8"], runs["SpR_alpha_0.9"]
    forward = compare(base, [method], score_ranges(base), Weights(1, 1))
    method.prompts = dict(reversed(method.prompts.items()))
    backward = compare(base, [method], score_ranges(base), Weights(1, 1))
    assert forward == backward


def test_same_data_same_picture(tmp_path: Path) -> None:
    archive = str(make_archive(tmp_path / "a"))
    for out in ("x", "y"):
        assert plot_compare.main([archive, "--out", str(tmp_path / out)]) == 0
    for suffix in ("png", "pdf", "csv"):
        one, two = ((tmp_path / out / f"{PAIR}.{suffix}").read_bytes() for out in ("x", "y"))
        assert one == two


def test_spearman_by_hand() -> None:
    """Ranks 0 1 2 3 against 1 0 2 3: 1 - 6 x 2 / (4 x 15) = .8. Ties share their ranks."""
    assert spearman(np.array([1, 2, 3, 4]), np.array([20, 10, 30, 40])) == pytest.approx(0.8)
    assert spearman(np.array([1, 1, 2]), np.array([1, 1, 2])) == pytest.approx(1)
    assert spearman(np.array([1, 2]), np.array([1, 2])) is None
    assert spearman(np.array([1, 1, 1]), np.array([1, 2, 3])) is None
