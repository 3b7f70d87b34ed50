"""Value heads: fitted by prompt, stored with their provenance, used for ranking alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from generator import Generator
from postprocess import fit_value_head
from postprocess.fit_value_head import Texts, fit
from rewards.value_head import BadValueHead, ValueHead, compact, features, load_value_head
from suite.hidden import read_states, write_states
from suite.prompts import Prompt
from suite.records import FolderRefused
from suite.settings import Settings, settings_for_record, settings_for_sameness
from tests.search import run_search
from tests.test_records import SETTINGS, objects, opened, prompts
from tests.test_replay import log_pool

SIZE = 12


def planted(num_prompts=12, texts=30, seed=0):
    """Final scores that follow a hidden direction within a prompt, which the score half shows."""
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal(SIZE)
    prompt = np.repeat(np.arange(num_prompts), texts)
    level = rng.standard_normal((num_prompts, SIZE))[prompt] * 3
    hidden = level + rng.standard_normal((len(prompt), SIZE))
    value = hidden @ direction
    final = value + 0.5 * rng.standard_normal(len(prompt))
    score = value + 4.0 * rng.standard_normal(len(prompt))
    return features(hidden, score), final, prompt, direction


def a_head(**changes):
    fields = dict(
        lengths=np.array([16, 64]),
        weights=np.stack((np.ones(SIZE + 1), np.full(SIZE + 1, 3.0))),
        bias=np.array([1.0, 2.0]),
        provenance={"reward_model_name": "tiny-reward", "llm_name": "tiny-llama"},
    )
    return ValueHead(**{**fields, **changes})


# ---- fitting -----------------------------------------------------------------------------------


def test_fit_finds_what_the_score_hides():
    x, y, prompt, _ = planted()
    fitted = fit({32: Texts(x, y, prompt)})[32]
    assert fitted.score_correlation < 0.75
    assert fitted.head_correlation > 0.95
    new_x, new_y, _, _ = planted(num_prompts=1, texts=400, seed=0)
    assert np.corrcoef(new_x @ fitted.weights + fitted.bias, new_y)[0, 1] > 0.95


def test_correlations_are_of_prompts_that_the_head_has_not_seen():
    """Pure noise with as many features as texts: fitted in sample it would correlate perfectly."""
    rng = np.random.default_rng(1)
    x = features(rng.standard_normal((120, 100)), rng.standard_normal(120))
    texts = Texts(x, rng.standard_normal(120), np.repeat(np.arange(6), 20))
    fitted = fit({16: texts})[16]
    assert abs(fitted.head_correlation) < 0.3
    assert np.isfinite(fitted.weights).all()


def test_a_constant_feature_does_no_harm():
    x, y, prompt, _ = planted()
    x[:, 3] = 7.0
    fitted = fit({32: Texts(x, y, prompt)})[32]
    assert np.isfinite(fitted.weights).all()
    assert fitted.head_correlation > 0.5


def test_from_logged_runs_to_a_file_that_main_takes(tiny_models, tmp_path, capsys):
    folder = log_pool(
        tiny_models, tmp_path / "Bo32", prompts=("Why?", "How?", "When?"), log_partial="8,24"
    )
    path = tmp_path / "heads" / "head.safetensors"
    assert fit_value_head.main([str(folder), "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "score alone" in printed and str(path) in printed
    head = load_value_head(path)
    assert head.lengths.tolist() == [8, 24]
    assert head.hidden_size == 32
    assert head.provenance["target"] == "final score"
    assert head.provenance["num_prompts"] == "3"
    assert head.provenance["runs"] == '["Bo32"]'
    head.check("tiny-reward", 32, head.provenance["reward_head_sha256"])
    with pytest.raises(BadValueHead, match="other weights"):
        head.check("tiny-reward", 32, "0" * 64)
    made = run_search(tiny_models, alpha=0.5, schedule="halving", min_tokens=8, init_batch_size=16,
                      head=head)  # fmt: skip
    assert all("values" in entry for entry in made["rounds"] if entry["cutoff"] is not None)


def test_states_of_two_reward_models_of_one_name_are_not_mixed(tiny_models, tmp_path, capsys):
    folder = log_pool(tiny_models, tmp_path / "Bo8", batch_size=8)
    sidecar = sorted(folder.glob("*.hidden.0.safetensors"))[0]
    states = read_states(sidecar)
    write_states(sidecar, states, {**states.names, "reward_head_sha256": "0" * 64})
    assert fit_value_head.main([str(folder), "--output", str(tmp_path / "h")]) == 1
    assert "different weights" in capsys.readouterr().err


def test_too_little_data_is_said(tiny_models, tmp_path, capsys):
    folder = log_pool(tiny_models, tmp_path / "Bo8", prompts=("Why?",), batch_size=8)
    assert fit_value_head.main([str(folder), "--output", str(tmp_path / "h")]) == 1
    assert "two prompts" in capsys.readouterr().err
    assert not (tmp_path / "h").exists()


def test_without_states_there_is_nothing_to_fit(tiny_models, tmp_path, capsys):
    folder = log_pool(tiny_models, tmp_path / "Bo8", batch_size=8, log_hidden=False)
    assert fit_value_head.main([str(folder), "--output", str(tmp_path / "h")]) == 1
    assert "--log_hidden" in capsys.readouterr().err


# ---- the file ----------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path):
    a_head().save(tmp_path / "head.safetensors")
    head = load_value_head(tmp_path / "head.safetensors")
    assert head.lengths.tolist() == [16, 64]
    assert head.provenance == a_head().provenance


@pytest.mark.parametrize(
    ("reward", "size", "said"),
    [("other-reward", SIZE, "tiny-reward, not other-reward"), ("tiny-reward", 7, "of size 12")],
)
def test_the_wrong_models_head_is_refused(reward, size, said):
    with pytest.raises(BadValueHead, match=said):
        a_head().check(reward, size)


def test_files_that_are_no_heads(tmp_path):
    (tmp_path / "text").write_text("hello")
    save_file({"lengths": np.zeros(1)}, tmp_path / "other")
    nan = a_head(bias=np.array([1.0, np.nan]))
    nan.save(tmp_path / "nan")
    a_head(lengths=np.array([64, 16])).save(tmp_path / "order")
    a_head(bias=np.zeros(3)).save(tmp_path / "sizes")
    for name in ("text", "other", "nan", "order", "sizes", "missing"):
        with pytest.raises(BadValueHead, match="--value_head"):
            load_value_head(tmp_path / name)


# ---- the prediction ----------------------------------------------------------------------------


def test_lengths_between_are_mixed_by_their_logarithm():
    hidden, scores = np.ones((2, SIZE)), np.array([0.0, 1.0])
    head = a_head()
    at_16, at_64 = head.predict(hidden, scores, 16), head.predict(hidden, scores, 64)
    assert at_16.tolist() == [SIZE + 1.0, SIZE + 2.0]
    assert at_64.tolist() == [3 * SIZE + 2.0, 3 * SIZE + 5.0]
    assert head.predict(hidden, scores, 32) == pytest.approx((at_16 + at_64) / 2)
    assert head.predict(hidden, scores, 3).tolist() == at_16.tolist()
    assert head.predict(hidden, scores, 999).tolist() == at_64.tolist()


def test_huge_states_stay_finite():
    assert np.isfinite(compact(np.array([[1e9, -1e9]]))).all()


# ---- in a run ----------------------------------------------------------------------------------

RUN = dict(alpha=0.5, schedule="halving", min_tokens=8, init_batch_size=24)


def test_it_ranks_the_unfinished_and_never_chooses_the_winner(tiny_models):
    """A head that turns the order round: the worst scores go on, and the winner is by score."""
    contrary = ValueHead(
        lengths=np.array([1]),
        weights=np.append(np.zeros(32), -1.0)[None],
        bias=np.zeros(1),
        provenance={"reward_model_name": "tiny-reward"},
    )
    made = run_search(tiny_models, head=contrary, ignore_stop=True, **RUN)
    first = made["rounds"][0]
    scores = dict(zip(first["candidates"], first["scores"], strict=True))
    gone = {r["candidate"] for r in made["rejected"] if r["round"] == 0}
    assert gone == set(sorted(scores, key=scores.get)[12:])
    assert first["values"] == pytest.approx([-s for s in first["scores"]])
    plain = run_search(tiny_models, ignore_stop=True, **RUN)
    by_candidate = {t["candidate"]: t["score"] for t in made["trajectories"]}
    assert not by_candidate.keys() & {t["candidate"] for t in plain["trajectories"]}


def test_finished_rows_rank_by_their_score(tiny_models):
    """Predictions of -100 for all who go on: the finished ones are never cut for them."""
    gloomy = ValueHead(
        lengths=np.array([1]),
        weights=np.zeros((1, 33)),
        bias=np.array([-100.0]),
        provenance={"reward_model_name": "tiny-reward"},
    )
    made = run_search(tiny_models, head=gloomy, **{**RUN, "alpha": 0.2, "min_round_tokens": 16})
    cuts = [set(r["candidates"]) for r in made["rounds"] if r["cutoff"] is not None]
    finished_later = (cuts[0] - cuts[1]) & {t["candidate"] for t in made["trajectories"]}
    assert finished_later, "predicted once, then finished"
    assert all(r["candidate"] in cuts[r["round"]] for r in made["rejected"])


def test_main_refuses_a_head_of_another_model(tiny_models, tmp_path, capsys):
    import main

    path = tmp_path / "head.safetensors"
    a_head().save(path)
    common = ["--model_dir", str(tiny_models), "--llm_name", "tiny-llama"]
    common += ["--reward_model_name", "tiny-reward", "--max_tokens", "200"]
    common += ["--output_folder", str(tmp_path / "out"), "--speculative_rejection"]
    assert main.main([*common, "--value_head", str(path)]) == 2  # 12 wide, the model is 32
    assert "hidden states of size 12" in capsys.readouterr().err
    assert main.main([*common, "--value_head", str(tmp_path / "none")]) == 2
    assert "can't be read" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--log_hidden"], ["--value_head", "x"]])
def test_rewards_without_hidden_states_are_refused_at_once(flag, capsys):
    from suite.arguments import parse

    argv = ["--reward_model_name", "module:function", *flag]
    if flag[0] == "--value_head":
        argv.append("--speculative_rejection")
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert "hidden states" in capsys.readouterr().err


def test_log_partial_is_checked_and_is_best_of_ns(capsys):
    from suite.arguments import parse

    assert parse(["--log_partial", "64,16,32,16"]).log_partial == "16,32,64"
    for argv in (["--log_partial", "16,0"], ["--log_partial", "16 32"],
                 ["--log_partial", "16", "--speculative_rejection"]):  # fmt: skip
        with pytest.raises(SystemExit):
            parse(argv)
        assert "--log_partial" in capsys.readouterr().err


def test_a_folder_is_resumed_with_the_head_that_it_was_made_with(tmp_path):
    """Its content counts: another one under the old path is refused, the same one elsewhere not."""
    path, elsewhere = tmp_path / "head.safetensors", tmp_path / "moved.safetensors"
    a_head().save(path)
    first = settings_for_record(Settings(speculative_rejection=True, value_head=str(path)))
    path.rename(elsewhere)
    a_head(bias=np.array([9.0, 9.0])).save(path)
    moved = settings_for_record(Settings(speculative_rejection=True, value_head=str(elsewhere)))
    other = settings_for_record(Settings(speculative_rejection=True, value_head=str(path)))
    assert settings_for_sameness(moved) == settings_for_sameness(first)
    assert settings_for_sameness(other) != settings_for_sameness(first)


def test_runs_with_and_without_a_head_share_no_folder(tmp_path):
    path = tmp_path / "head.safetensors"
    a_head().save(path)
    without = replace(SETTINGS, speculative_rejection=True)
    both = (without, replace(without, value_head=str(path)))
    (prompt,) = prompts(1)
    for there, now in (both, both[::-1]):
        folder = tmp_path / str(now.value_head is None)
        with opened(folder, there) as run:
            run.write(prompt, objects(prompt, there))
            assert run.finished([prompt]) == {0}
        with opened(folder, now) as run, pytest.raises(FolderRefused, match="value_head_sha256 is"):
            run.finished([prompt])


def test_records_name_the_head_that_was_loaded(tmp_path):
    """Not what lies under its path by the time that a prompt is done."""
    path = tmp_path / "head.safetensors"
    a_head().save(path)
    settings = Settings(speculative_rejection=True, value_head=str(path))
    loaded = settings_for_record(settings)["value_head_sha256"]
    processes = SimpleNamespace(rank=0, world_size=1)
    generator = Generator(settings, processes, parts=None, head=load_value_head(path))
    a_head(bias=np.array([9.0, 9.0])).save(path)
    made = generator._head(Prompt(0, "Why?", {"JSON_idx": 0, "prompt": "Why?"}), 0.0)
    assert made["value_head_sha256"] == loaded
    assert settings_for_record(settings)["value_head_sha256"] != loaded
