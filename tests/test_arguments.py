"""The command line: rules, messages, exit codes, and a thousand random lines."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from suite.arguments import Settings, parse, settings_for_record
from suite.settings import base_name, output_folder

PROJECT = Path(__file__).resolve().parent.parent
SPR = ["--speculative_rejection"]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command line that must end with exit code 2."""
    with pytest.raises(SystemExit) as exit_:
        parse(argv)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_defaults_are_the_papers() -> None:
    settings = parse([])
    assert settings == Settings()
    assert (settings.max_tokens, settings.max_gen_tokens, settings.batch_size) == (2048, 2048, 20)
    assert (settings.top_k, settings.top_p, settings.temperature) == (50, 1.0, 1.0)
    assert settings.llm_name == "SmolLM2-135M-Instruct"
    assert not settings.speculative_rejection


def test_the_papers_two_lines_parse() -> None:
    models = "--llm_name Meta-Llama-3-8B --reward_model_name ArmoRM-Llama3-8B-v0.1"
    bon = parse(
        f"--output_folder ./archive/Bo120_Meta-Llama-3-8B_ArmoRM-Llama3-8B-v0.1_0 {models} "
        "--max_tokens 8000 --batch_size 120 --seed 0".split()
    )
    assert (bon.batch_size, bon.max_tokens, bon.seed) == (120, 8000, 0)
    spr = parse(
        f"--output_folder ./archive/SpR_alpha_0.5_Meta-Llama-3-8B_ArmoRM-Llama3-8B-v0.1_0 {models} "
        "--max_tokens 8000 --seed 0 --speculative_rejection --alpha 0.5".split()
    )
    assert spr.speculative_rejection and spr.alpha == 0.5
    assert spr.output_folder.endswith("SpR_alpha_0.5_Meta-Llama-3-8B_ArmoRM-Llama3-8B-v0.1_0")


def test_dashes_are_accepted_in_flags_and_kept_in_values() -> None:
    settings = parse(["--batch-size", "3", "--llm-name=a-b/c-d", "--output_folder=--x-y"])
    assert settings.batch_size == 3
    assert settings.llm_name == "a-b/c-d"
    assert settings.output_folder == "--x-y"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--alpha 1.2", "--alpha must be in [0, 1)"),
        ("--alpha 1", "--alpha must be in [0, 1)"),
        ("--alpha -1", "got '-1'"),
        ("--alpha -1e-3", "got '-1e-3'"),
        ("--alpha nan", "got 'nan'"),
        ("--alpha -inf", "got '-inf'"),
        ("--alpha half", "got 'half'"),
        ("--keep_fraction 0", "--keep_fraction must be in (0, 1]"),
        ("--keep_fraction 1.01", "--keep_fraction must be in (0, 1]"),
        ("--alpha 0.5 --keep_fraction 0.5", "give one of them"),
        ("--init_batch_size 0", "--init_batch_size must be an integer from 1"),
        ("--init_batch_size 9 --max_batch_size 8", "must not exceed --max_batch_size"),
        ("--min_round_tokens 0", "--min_round_tokens"),
        ("--schedule fixed:0", "--schedule must be memory, halving or fixed:K"),
        ("--schedule sometimes", "got 'sometimes'"),
        ("--min_tokens 3000", "--min_tokens must be less than the longest answer"),
        ("--min_tokens 16 --max_gen_tokens 16", "--min_tokens must be less than the longest"),
        (
            "--schedule fixed:99 --max_gen_tokens 16",
            "first round at 99 tokens, and answers end at 16",
        ),
        ("--schedule halving --max_gen_tokens 16", "first round at 16 tokens"),
        ("--schedule halving --alpha 0", "--alpha 0 rejects nothing"),
        ("--min_tokens 4 --alpha 0", "--alpha 0 rejects nothing"),
        ("--value_head FILE --alpha 0", "--alpha 0 rejects nothing"),
    ],
)
def test_bad_rejection_values(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused([*SPR, *line.split()], capsys)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--batch_size 0", "--batch_size must be an integer from 1"),
        ("--batch_size -4", "got '-4'"),
        ("--batch_size 2.5", "got '2.5'"),
        ("--batch_size 99999999999", "to 2147483647"),
        ("--max_tokens 0", "--max_tokens"),
        ("--max_gen_tokens -1", "--max_gen_tokens"),
        ("--num_prompts 0", "--num_prompts"),
        ("--seed -1", "--seed"),
        ("--seed 1e3", "got '1e3'"),
        ("--top_k -2", "--top_k must be an integer from -1"),
        ("--top_p 1.5", "--top_p must be in [0, 1]"),
        ("--top_p -0.1", "--top_p"),
        ("--temperature -1", "--temperature"),
        ("--temperature inf", "got 'inf'"),
        ("--temperature 1e-30", "0 is greedy"),
        ("--gpu_memory_utilization 0", "--gpu_memory_utilization must be in (0, 1]"),
        ("--kv_cache_gb 0", "--kv_cache_gb must be above 0"),
        ("--kv_cache_gb 1e300", "--kv_cache_gb"),
        ("--dtype int8", "bfloat16"),
        ("--prompt_template llama", "alpaca"),
        ("--parallel rows", "candidates"),
        ("--reward_cache maybe", "auto"),
        ("--reward_timeout 5", "module:function"),
        ("--log_partial 4,64 --max_gen_tokens 64", "--log_partial 64 is no unfinished text"),
        ("--llm_name ..", "must end in a model's name"),
        ("--llm_name /", "must end in a model's name"),
        ("--llm_name=", "must be a model's name"),
        ("--data_filename=", "not blank"),
        ("--batch 3", "unrecognized arguments: --batch"),  # no abbreviations
        ("--batchsize 3", "did you mean --batch_size?"),
        ("stray", "unrecognized arguments: stray"),
        ("--seed", "--seed expected one argument, got none; give --seed N: process r draws"),
        ("--alpha --refill", "got none; give --alpha A: rejection rate: a round keeps the best"),
        ("--dtype", "got none; give --dtype bfloat16|float16|float32: of weights"),
        ("--refill=3", "--refill takes no value, got '3'; leave the value out"),
        ("--dtype int8", "--dtype: invalid choice: 'int8' (choose from 'bfloat16', "),
    ],
)
def test_bad_values(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(line.split(), capsys)


@pytest.mark.parametrize(
    "line",
    [
        "--alpha 0.5",
        "--keep_fraction 0.5",
        "--init_batch_size 4",
        "--max_batch_size 4",
        "--min_round_tokens 8",
        "--refill",
        "--value_head head.safetensors",
        "--schedule memory",
        "--min_tokens 0",
    ],
)
def test_rejection_flags_are_refused_without_it(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(line.split(), capsys)
    assert line.split()[0] in message and "--speculative_rejection" in message
    parse([*SPR, *line.split()])  # and are fine with it


def test_keep_fraction_is_one_minus_alpha() -> None:
    assert parse([*SPR, "--keep_fraction", "0.7"]).alpha == 0.3
    assert parse([*SPR, "--keep_fraction", "1"]).alpha == 0.0
    assert parse([*SPR, "--keep_fraction", "1e-15"]).alpha < 1.0


@pytest.mark.parametrize("alpha", ["0", "0.5", "0.999", "auto", "-0.0"])
def test_good_alphas(alpha: str) -> None:
    value = parse([*SPR, "--alpha", alpha]).alpha
    assert value == ("auto" if alpha == "auto" else abs(float(alpha)))
    assert str(value) != "-0.0"


def test_settings_are_json() -> None:
    recorded = settings_for_record(parse([*SPR, "--alpha", "auto"]))
    assert json.loads(json.dumps(recorded, allow_nan=False)) == recorded
    assert recorded["alpha"] == "auto" and recorded["batch_size"] == 20


def test_base_names() -> None:
    assert base_name("meta-llama/Meta-Llama-3-8B") == "Meta-Llama-3-8B"
    assert base_name("/a/b/model-1/") == "model-1"
    assert base_name("rewards_of_mine:length") == "rewards_of_mine-length"
    assert base_name("x" * 500) == "x" * 80


def test_default_folders_say_method_models_and_seed() -> None:
    models = "SmolLM2-135M-Instruct_SmolLM2-135M-Reward_3"
    bon = parse(["--batch_size", "120", "--seed", "3"])
    assert output_folder(bon, 8) == PROJECT / "archive" / f"Bo960_{models}"
    spread = parse(["--batch_size", "120", "--seed", "3", "--parallel", "prompts"])
    assert output_folder(spread, 8).name == f"Bo120_{models}"
    spr = parse([*SPR, "--alpha", "0.5", "--seed", "3"])
    assert output_folder(spr, 8).name == f"SpR_alpha_0.5_{models}"
    refill = parse([*SPR, "--refill", "--alpha", "0.5", "--seed", "3"])
    assert output_folder(refill, 1).name == f"SpRF_alpha_0.5_{models}"


def test_help_is_fast_and_names_every_flag() -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "main.py", "--help"], cwd=PROJECT, capture_output=True, text=True
    )
    assert time.monotonic() - start < 2
    assert done.returncode == 0
    for name in settings_for_record(Settings()):
        assert f"--{name}" in done.stdout


def test_no_heavy_import_before_parsing() -> None:
    program = (
        "import sys, main; from suite.arguments import parse; parse([]); "
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True)
    assert done.stdout.decode().strip() == "[]", done.stderr.decode()


def test_a_bad_alpha_ends_main_with_code_2_at_once() -> None:
    start = time.monotonic()
    line = [sys.executable, "main.py", "--speculative_rejection", "--alpha", "nan"]
    done = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True)
    assert time.monotonic() - start < 5
    assert done.returncode == 2
    assert "--alpha must be in [0, 1)" in done.stderr


def test_a_thousand_random_lines_end_in_settings_or_exit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(0)
    flags = [f"--{name}" for name in settings_for_record(Settings())]
    odd = ["", " ", "-1", "0", "1", "0.5", "1e999", "nan", "auto", "é", "\0", "x" * 5000, "--"]
    odd += [
        "-",
        "--help=1",
        "=",
        "../..",
        "9" * 30,
        "fixed:8",
        "[1]",
        "--alpha",
        "-inf",
        "%s",
        "{}",
    ]
    codes = {"settings": 0, 0: 0, 2: 0}
    for _ in range(1000):
        argv = [draw.choice([*flags, *odd]) for _ in range(draw.randrange(8))]
        argv = [f"{a}={draw.choice(odd)}" if draw.random() < 0.2 else a for a in argv]
        try:
            settings = parse(argv)
        except SystemExit as e:
            codes[e.code] += 1
            printed = capsys.readouterr()
            assert printed.err if e.code == 2 else printed.out
        else:
            codes["settings"] += 1
            json.dumps(settings_for_record(settings), allow_nan=False)
            assert settings.alpha == "auto" or 0 <= settings.alpha < 1
    assert codes["settings"] > 20 and codes[2] > 500, codes
