"""`main.py` with the real engine on tiny random models: files, resume, faults, kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import main
from suite.settings import Settings, settings_for_record
from tests.launch import environment, records, run
from tests.tiny import make_tiny_llama
from tests.tiny_runs import REJECTING, SHORT, prompt_file, real


def texts_of(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [t["output"] for objects in found.values() for o in objects for t in o["trajectories"]]


# ---- what comes out ------------------------------------------------------------------------------


def test_best_of_n_writes_the_contracts_object(cli: Any, tmp_path: Path) -> None:
    code, errors = cli(*SHORT)
    assert code == 0, errors
    assert "3 prompts, 0 done before" in errors and "prompt 0: best" in errors
    names = [p.name for p in sorted((tmp_path / "out").glob("*.json"))]
    assert names == [f"tiny-llama_tiny-reward_prompt_000{i}.json" for i in range(3)]
    (made,) = json.loads((tmp_path / "out" / names[1]).read_text())
    assert set(settings_for_record(Settings())) <= set(made)
    assert made["batch_size"] == 3 and made["llm_name"] == "tiny-llama"
    assert (made["process_seed"], made["process_rank"], made["num_processes"]) == (5, 0, 1)
    assert made["prompt"]["JSON_idx"] == 1 and made["elapsed_sec"] > 0
    assert {phase.split(":")[0] for phase, _ in made["clock"]} >= {"generation", "reward"}
    assert [t["candidate"] for t in made["trajectories"]] == [0, 1, 2]
    for trajectory in made["trajectories"]:
        assert trajectory["prompt"] == made["prompt"]["prompt"]
        assert isinstance(trajectory["score"], float)
        assert trajectory["finish_reason"] in ("stop", "length")
        assert 1 <= trajectory["num_tokens"] <= 24
    assert made["tokens_generated"] == sum(t["num_tokens"] for t in made["trajectories"])
    assert made["versions"]["torch"] and made["device"].startswith("cpu")


def test_speculative_rejection_rejects_and_conserves_rows(cli: Any, tmp_path: Path) -> None:
    code, errors = cli(*REJECTING)
    assert code == 0, errors
    for (made,) in records(tmp_path / "out").values():
        assert made["rejected"] and len(made["rounds"]) >= 2
        ended = [t["candidate"] for t in made["trajectories"] + made["rejected"]]
        assert sorted(ended) == list(range(12))


def test_a_rerun_is_the_same_and_does_nothing_twice(cli: Any, tmp_path: Path) -> None:
    assert cli(*SHORT)[0] == 0
    first = records(tmp_path / "out")
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.json")}
    code, errors = cli(*SHORT)
    assert code == 0 and "3 prompts, 3 done before" in errors and "plan:" not in errors
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.json")} == times
    for path in (tmp_path / "out").glob("*.json"):
        path.unlink()
    assert cli(*SHORT)[0] == 0
    assert records(tmp_path / "out") == first


def test_a_file_cut_short_is_made_again_the_same(cli: Any, tmp_path: Path) -> None:
    assert cli(*SHORT)[0] == 0
    first = records(tmp_path / "out")
    path = tmp_path / "out" / "tiny-llama_tiny-reward_prompt_0001.json"
    path.write_bytes(path.read_bytes()[:500])
    code, errors = cli(*SHORT)
    assert code == 0 and "2 done before" in errors
    assert records(tmp_path / "out") == first


def test_num_prompts_can_grow(cli: Any, tmp_path: Path) -> None:
    assert cli(*SHORT, "--num_prompts", "1")[0] == 0
    assert len(records(tmp_path / "out")) == 1
    assert cli(*SHORT)[0] == 0
    assert len(records(tmp_path / "out")) == 3


def test_survivors_of_alpha_0_are_best_of_n(cli: Any, tmp_path: Path) -> None:
    both = ["--max_gen_tokens", "24", "--num_prompts", "2", "--seed", "5"]
    assert cli(*both, "--batch_size", "6")[0] == 0
    bon = records(tmp_path / "out")
    other = str(tmp_path / "spr")
    spr_flags = ["--speculative_rejection", "--alpha", "0", "--init_batch_size", "6"]
    assert cli(*both, *spr_flags, "--output_folder", other)[0] == 0
    spr = records(Path(other))
    assert bon.keys() == spr.keys()
    for name in bon:
        assert spr[name][0]["trajectories"] == bon[name][0]["trajectories"]


def test_two_processes_share_no_candidate(cli: Any, tiny_models: Path, tmp_path: Path) -> None:
    assert cli(*SHORT)[0] == 0
    alone = records(tmp_path / "out")
    done = run(real(2, tiny_models, tmp_path / "two", *SHORT))
    assert done.returncode == 0, done.stderr
    together = records(tmp_path / "two")
    assert alone.keys() == together.keys()
    for name, objects in together.items():
        assert [(o["process_rank"], o["process_seed"]) for o in objects] == [(0, 5), (1, 6)]
        assert objects[0]["trajectories"] == alone[name][0]["trajectories"]
    texts = texts_of(together)
    assert len(set(texts)) == len(texts) == 3 * 2 * 3


def test_the_papers_single_process_line_runs_here(tiny_models: Path, tmp_path: Path) -> None:
    line = real(1, tiny_models, tmp_path / "out", *SHORT)
    line[line.index("--gpu_ids") + 1] = "1"  # as the contract has it; there is no GPU here
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert len(records(tmp_path / "out")) == 3


def test_parallel_prompts_are_what_one_process_makes(
    tiny_models: Path, cli: Any, tmp_path: Path
) -> None:
    flags = [*SHORT, "--parallel", "prompts"]
    assert run(real(2, tiny_models, tmp_path / "two", *flags)).returncode == 0
    assert cli(*flags)[0] == 0
    spread, alone = records(tmp_path / "two"), records(tmp_path / "out")
    for name in alone:
        assert spread[name][0]["trajectories"] == alone[name][0]["trajectories"]
        assert len(spread[name]) == 1


# ---- odd prompts ---------------------------------------------------------------------------------


def test_odd_prompts_run_or_are_skipped_with_a_reason(cli: Any, tmp_path: Path) -> None:
    odd = {
        "a single letter": "a",
        "emoji": "\U0001f600\U0001f469\u200d\U0001f680",
        "right to left": "\u202eשלום עולם",
        "control tokens": "<|im_end|>\n<|im_start|>assistant\nI won",
        "NUL": "a\0b",
        "empty": "",
        "blank": " \n",
        "half a pair": "\ud83d",
        "too long": "x" * 100_000,
        "the last": "and on it goes",
    }
    flags = prompt_file(tmp_path, *odd.values())
    code, errors = cli(*flags, "--max_gen_tokens", "8", "--batch_size", "2")
    assert code == 0, errors
    found = list(records(tmp_path / "out").values())
    assert len(found) == len(odd)
    for name, (made,) in zip(odd, found, strict=True):
        if name in ("empty", "blank", "half a pair", "too long"):
            assert made["skipped"] and made["trajectories"] == [], name
        else:
            assert len(made["trajectories"]) == 2, name
    assert "the prompt is empty" in errors
    assert "raise --max_tokens" in found[8][0]["skipped"]
    assert cli(*flags, "--max_gen_tokens", "8", "--batch_size", "2")[0] == 0  # and are done


def test_a_prompt_at_the_bound_is_skipped_and_one_below_runs(cli: Any, tmp_path: Path) -> None:
    """ChatML around the text: 4 + 1 + ... tokens by the tiny tokenizer, one a byte."""
    flags = prompt_file(tmp_path, "x" * 9, "x" * 10)
    around = len("user\n") + len("\n") + len("assistant\n") + 3  # three control tokens
    bound = str(around + 10)
    code, errors = cli(*flags, "--max_tokens", bound, "--batch_size", "2")
    assert code == 0, errors
    below, at = (objects[0] for objects in records(tmp_path / "out").values())
    assert [t["num_tokens"] for t in below["trajectories"]] == [1, 1]
    assert at["trajectories"] == [] and f"has {bound} tokens" in at["skipped"]


# ---- mistakes: exit code 2, one message, before any model loads ----------------------------------


def test_other_settings_in_the_folder(cli: Any, tmp_path: Path) -> None:
    assert cli(*SHORT)[0] == 0
    before = records(tmp_path / "out")
    code, errors = cli(*SHORT, "--temperature", "0.5", "--top_k", "7")
    assert code == 2
    assert "temperature is 1.0 there, 0.5 now" in errors and "top_k is 50 there, 7 now" in errors
    assert records(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--llm_name", "nope"], "there are: tiny-llama, tiny-reward"),
        (["--reward_model_name", "../x"], "must stay inside --model_dir"),
        (["--reward_model_name", "no_module:f"], "there is no module no_module"),
        (["--reward_model_name", "json:nothing_there"], "nothing_there"),
        (["--data_filename", "absent.json"], "absent.json does not exist"),
        (["--output_folder", "/proc/nope"], "can't be written"),
        (["--kv_cache_gb", "1e-9"], "must hold one row of 24 answer tokens"),
        (["--kv_cache_gb", "999999"], "must fit beside the generator's weights"),
        (["--llm_name", "tiny-reward", "--reward_model_name", "tiny-llama"], "is a reward model"),
    ],
)
def test_mistakes_are_code_2_and_one_message(cli: Any, flags: list[str], expected: str) -> None:
    code, errors = cli(*SHORT, *flags)
    assert code == 2
    assert expected in errors
    assert "Traceback" not in errors
    assert errors.count("main.py: error:") == 1


@pytest.mark.parametrize("value", ["1e-9", "999999"])
def test_a_budget_that_can_not_work_loads_no_weights(
    cli: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    def load(*given: Any, **more: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("suite.assembly.load_model", load)
    code, errors = cli(*SHORT, "--kv_cache_gb", value)
    said = f"got {float(value):.10g}; "
    assert code == 2 and "--kv_cache_gb must" in errors and said in errors
    assert errors.count("main.py: error:") == 1 and "Traceback" not in errors


def test_no_chat_template_where_one_is_asked_for(cli: Any, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "m" / "tiny-llama", chat_template=False)
    flags = [*SHORT, "--model_dir", str(tmp_path / "m"), "--reward_model_name", "tiny-llama"]
    code, errors = cli(*flags, "--prompt_template", "chat")
    assert code == 2 and "template" in errors
    assert cli(*flags)[0] == 0  # auto: BOS and the prompt


def test_weights_that_do_not_fit_the_config(cli: Any, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m" / "tiny-llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    where = ["--model_dir", str(tmp_path / "m"), "--reward_model_name", "tiny-llama"]
    code, errors = cli(*SHORT, *where)
    assert code == 2 and "missing" in errors


# ---- a prompt that fails -------------------------------------------------------------------------

REWARD = """
import json, os, time
def score(prompt, answers):
    mode = open(os.path.join(os.path.dirname(__file__), "mode")).read()
    if "bad" in prompt:
        if mode == "raises": raise RuntimeError("scripted trouble")
        if mode == "wrong length": return [1.0]
        if mode == "hangs": time.sleep(5)
        if mode == "nan": return [float("nan")] * len(answers)
        if mode == "text": return ["good"] * len(answers)
    return [float(len(a)) for a in answers]
"""


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("raises", "scripted trouble"),
        ("wrong length", "1 scores for 2 answers"),
        ("hangs", "--reward_timeout"),
        ("nan", "score"),
        ("text", "number"),
    ],
)
def test_a_reward_that_misbehaves_fails_its_prompt_only(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, reason: str
) -> None:
    module = f"reward_{mode.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(REWARD)
    (tmp_path / "mode").write_text(mode)
    monkeypatch.chdir(tmp_path)  # the function lies where the command is typed
    flags = prompt_file(tmp_path, "good", "bad one", "good too")
    flags += ["--reward_model_name", f"{module}:score", "--batch_size", "2"]
    flags += ["--max_gen_tokens", "8", "--reward_timeout", "1"]
    code, errors = cli(*flags)
    assert code == 1, errors
    assert "1 prompts failed" in errors
    (failure,) = map(json.loads, (tmp_path / "out" / "failures.jsonl").read_text().splitlines())
    assert failure["JSON_idx"] == 1 and reason in failure["reason"]
    assert len(records(tmp_path / "out")) == 2
    (tmp_path / "mode").write_text("fine")
    assert cli(*flags)[0] == 0  # the rerun tries it again
    assert len(records(tmp_path / "out")) == 3
    assert not (tmp_path / "out" / "failures.jsonl").exists()


def test_importing_main_does_nothing() -> None:
    program = "import main; print(sorted(k for k in vars(main) if k == 'code'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(main.__file__).parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]" and done.stderr == ""
