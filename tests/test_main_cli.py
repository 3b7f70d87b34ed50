"""`main.py` with the real engine on tiny random models: files, resume, faults, kills."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import main
from suite.settings import Settings, settings_for_record
from tests.launch import begin, environment, kill, launcher, records, run, wait_for, workers
from tests.tiny import make_tiny_llama

MODELS = ["--llm_name", "tiny-llama", "--reward_model_name", "tiny-reward"]
SHORT = ["--max_gen_tokens", "24", "--batch_size", "3", "--num_prompts", "3", "--seed", "5"]
# Twelve rows of two pages (64 tokens) fill the budget of 24 pages; a third page needs a cut.
REJECTING = [
    *("--speculative_rejection", "--alpha", "0.5", "--init_batch_size", "12"),
    *("--max_gen_tokens", "120", "--kv_cache_gb", "0.0002", "--reward_cache", "off"),
    *("--num_prompts", "3", "--seed", "5"),
]


# Long enough that a kill lands between two files: some 0.2 s a prompt.
KILLED = {
    "bon": [*SHORT, "--max_gen_tokens", "100", "--batch_size", "8", "--num_prompts", "8"],
    "spr": [*REJECTING, "--num_prompts", "8"],
}


@pytest.fixture
def cli(
    tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs `main.main` in this process, into `tmp_path/out`; gives exit code and stderr."""

    def call(*flags: str) -> tuple[int, str]:
        given = [*MODELS, "--model_dir", str(tiny_models), "--output_folder", str(tmp_path / "out")]
        try:
            code = main.main([*given, *flags])
        except SystemExit as e:
            code = e.code
        return code, capsys.readouterr().err

    return call


def prompt_file(tmp_path: Path, *texts: str) -> list[str]:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"JSON_idx": i, "prompt": t} for i, t in enumerate(texts)]))
    return ["--data_filename", str(path)]


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


@pytest.fixture(scope="module")
def two_processes(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uninterrupted runs with two processes: folders `short`, and `bon` and `spr` of 8 prompts."""
    folder = tmp_path_factory.mktemp("two")
    for name, flags in {"short": SHORT, **KILLED}.items():
        done = run(real(2, tiny_models, folder / name, *flags))
        assert done.returncode == 0, done.stderr
    return folder


def real(num_processes: int, models: Path, out: Path, *flags: str) -> list[str]:
    where = ["--model_dir", str(models), "--output_folder", str(out)]
    return [*launcher(num_processes), "main.py", *MODELS, *where, *flags]


def test_two_processes_share_no_candidate(two_processes: Path, cli: Any, tmp_path: Path) -> None:
    assert cli(*SHORT)[0] == 0
    alone = records(tmp_path / "out")
    together = records(two_processes / "short")
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
        (["--kv_cache_gb", "1e-9"], "--kv_cache_gb"),
        (["--llm_name", "tiny-reward", "--reward_model_name", "tiny-llama"], "is a reward model"),
    ],
)
def test_mistakes_are_code_2_and_one_message(cli: Any, flags: list[str], expected: str) -> None:
    code, errors = cli(*SHORT, *flags)
    assert code == 2
    assert expected in errors
    assert "Traceback" not in errors
    assert errors.count("main.py: error:") == 1


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


# ---- kill and resume -----------------------------------------------------------------------------

WAYS = ("one", "all", "term", "interrupt")


def test_killed_runs_resume_to_the_same_folder(
    two_processes: Path, tiny_models: Path, tmp_path: Path
) -> None:
    _kill_and_resume(two_processes, tiny_models, tmp_path, 4, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_25_killed_runs_resume_to_the_same_folder(
    two_processes: Path, tiny_models: Path, tmp_path: Path
) -> None:
    _kill_and_resume(two_processes, tiny_models, tmp_path, 25, seed=1)


def _kill_and_resume(
    uninterrupted: Path, models: Path, tmp_path: Path, number: int, seed: int
) -> None:
    """Each kill hits a run somewhere between its start and its end; then a run goes to the end."""
    draw = random.Random(seed)
    for attempt in range(number):
        method = ("bon", "spr")[attempt // len(WAYS) % 2 if number > len(WAYS) else attempt % 2]
        out = tmp_path / f"{method}{attempt}"
        line = real(2, models, out, *KILLED[method])
        way = WAYS[attempt % len(WAYS)]
        _start_and_kill(line, out, way, draw)
        left = _check_whole(out)
        done = run(line)
        assert done.returncode == 0, (way, done.stderr)
        assert records(out) == records(uninterrupted / method), way
        for path, time_ns in left.items():
            assert path.stat().st_mtime_ns == time_ns, f"{path.name} was computed twice ({way})"
        assert not list(out.glob(".*.tmp")) and not (out / "failures.jsonl").exists()


def _start_and_kill(line: list[str], out: Path, way: str, draw: random.Random) -> None:
    with begin(line) as process:
        wait_for(lambda: len(workers(out)) == 2 or process.poll() is not None, what="two workers")
        files = draw.randrange(8)  # with 0: while starting; otherwise about when that one appears
        wait_for(partial(_has_files, process, out, files), what=f"{files} files")
        time.sleep(draw.uniform(0, 0.3 if files else 4))
        pids = workers(out)
        start = time.monotonic()
        if way == "one" and pids:
            kill([draw.choice(pids)])
        elif way == "all":
            os.killpg(process.pid, signal.SIGKILL)
            kill(pids)
        elif way == "term":
            process.terminate()
        elif way == "interrupt":
            process.send_signal(signal.SIGINT)
        limit = 60 if way == "one" else 10
        wait_for(lambda: not workers(out), limit, f"the end after {way}")
        process.communicate(timeout=60)
        assert time.monotonic() - start < 60


def _has_files(process: subprocess.Popen[str], out: Path, number: int) -> bool:
    return len(records(out)) >= number or process.poll() is not None


def _check_whole(out: Path) -> dict[Path, int]:
    """Every file that is there parses; gives their times."""
    found = {}
    for path in out.glob("*_prompt_*.json"):
        assert json.loads(path.read_text())
        found[path] = path.stat().st_mtime_ns
    return found


# ---- load --------------------------------------------------------------------------------------


def test_memory_time_and_handles_stay_flat(tiny_models: Path, tmp_path: Path) -> None:
    _run_many(tiny_models, tmp_path, 300)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_thousand_prompts_stay_flat(tiny_models: Path, tmp_path: Path) -> None:
    _run_many(tiny_models, tmp_path, 2000)


def _run_many(models: Path, tmp_path: Path, number: int) -> None:
    """8 candidates a prompt: memory within 5 % after a third, no handle more, no slower prompt."""
    flags = prompt_file(tmp_path, *(f"prompt number {i} of many" for i in range(number)))
    out = tmp_path / "out"
    where = ["--model_dir", str(models), "--output_folder", str(out)]
    size = ["--batch_size", "8", "--max_gen_tokens", "16"]
    line = [sys.executable, "main.py", *MODELS, *where, *flags, *size]
    samples = []
    with begin(line) as process:
        drain = threading.Thread(target=process.communicate, daemon=True)
        drain.start()
        while process.poll() is None:
            samples.append((len(list(out.glob("*.json"))), *_memory_and_handles(process.pid)))
            time.sleep(0.1)
        drain.join(30)
    assert process.returncode == 0
    later = [s for s in samples if number / 3 <= s[0] < number and s[1] and s[2]]
    assert len(later) >= 5, f"{len(samples)} samples are too few to see a leak"
    memory = [s[1] for s in later]
    assert max(memory) <= 1.05 * memory[0], f"memory grows: {memory[0]} to {max(memory)} kB"
    handles = [s[2] for s in later]
    assert max(handles) <= min(handles) + 3, f"handles grow: {handles}"
    seconds = [objects[0]["elapsed_sec"] for objects in _with_times(out)]
    early, late = sorted(seconds[number // 3 : 2 * number // 3]), sorted(seconds[-number // 3 :])
    assert late[len(late) // 2] < 1.5 * early[len(early) // 2]


def _memory_and_handles(pid: int) -> tuple[int, int]:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+([0-9]+) kB", status)
        return (int(resident[1]) if resident else 0), len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0, 0


def _with_times(out: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("*_prompt_*.json"))]


# ---- nothing runs code from a model --------------------------------------------------------------


ROOT = Path(main.__file__).parent


def _sources() -> list[Path]:
    """The project's own Python files without the tests; what is hidden is not entered."""
    tops = [p for p in ROOT.iterdir() if p.name != "tests" and not p.name.startswith(".")]
    return [*ROOT.glob("*.py"), *(file for top in tops for file in top.rglob("*.py"))]


def test_no_pickle_and_no_remote_code_in_the_project() -> None:
    words = ("pickle.load", "torch.load(", "weights_only=False", "eval(", "exec(")
    words += ("import pickle", "from pickle", "allow_pickle", "import marshal", "import shelve")
    words += ("import joblib", "torch.jit.load", "os.system(", "shell=True")
    for path in _sources():
        # Said as False it is fine: left out, a tokenizer with code of its own would ask.
        content = path.read_text().replace("trust_remote_code=False", "")
        assert "trust_remote_code" not in content, path
        assert not [w for w in words if re.search(rf"(?<![\w.]){re.escape(w)}", content)], path


def test_every_load_by_transformers_names_what_it_refuses() -> None:
    """Left out, code of the folder would be offered, and a pickle be opened."""
    seen = set()
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr != "from_pretrained":
                continue
            owner = ast.unparse(called.value).rpartition(".")[2]
            said = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert said.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
            if "Tokenizer" not in owner and "Config" not in owner:
                assert said.get("use_safetensors") == "True", f"{path}:{node.lineno}"
            seen.add(path.relative_to(ROOT).parts[0])
    assert seen >= {"suite", "benchmarks"}


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
