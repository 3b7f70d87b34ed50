"""The benchmark commands run as documented, on a tiny model on the CPU; their last line is JSON."""

from __future__ import annotations

import json
import re

import pytest
import torch

from benchmarks import bench_decode, bench_rejection, bench_run, bench_score

CPU = torch.device("cpu")


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_bench_decode_prints_time_and_shares(capsys):
    assert bench_decode.main(["--shape", "tiny", "--cases", "16x8,40x24", "--new_tokens", "9"]) == 0
    rows = last_json(capsys)["rows"]
    assert [(row["prompt"], row["rows"]) for row in rows] == [(16, 8), (40, 24)]
    for row in rows:
        assert row["tokens_per_sec"] == pytest.approx(row["rows"] / row["ms_per_step"] * 1e3)
        assert row["floor_ms"] > 0


@pytest.mark.parametrize(
    ("given", "measured"),
    [([], [True, False]), (["none"], [False, False]), (["16x4,16x8"], [True, True])],
)
def test_bench_decode_measures_transformers_beside_ours(capsys, given, measured):
    """The first case where nothing is said."""
    argv = ["--shape", "tiny", "--cases", "16x4,16x8", "--new_tokens", "9", "--repeats", "1"]
    argv += ["--skip_floor", *(["--transformers", *given] if given else [])]
    assert bench_decode.main(argv) == 0
    times = [row.get("transformers_ms") for row in last_json(capsys)["rows"]]
    assert [time is not None and time > 0 for time in times] == measured


FAKE_VLLM = """
import time

class LLM:
    def __init__(self, model, load_format, **options):
        from transformers import AutoConfig
        config = AutoConfig.from_pretrained(model)
        assert load_format == "dummy" and config.architectures == ["LlamaForCausalLM"]
        assert (config.vocab_size, config.num_hidden_layers, config.head_dim) == (512, 2, 16)
        assert options["max_num_seqs"] == 24 and options["max_model_len"] == 49

    def generate(self, prompts, sampling, use_tqdm):
        assert len({*map(len, (p["prompt_token_ids"] for p in prompts))}) == 1
        time.sleep(0.01 * sampling.max_tokens)
        print("a message of the engine")

class SamplingParams:
    def __init__(self, **options):
        self.max_tokens = options["max_tokens"]
"""


def test_bench_decode_runs_vllm_in_a_process_of_its_own(capsys, tmp_path, monkeypatch):
    """Where it is installed (here a stand-in that sleeps 10 ms a step); otherwise it says so."""
    argv = ["--shape", "tiny", "--cases", "16x4,40x24", "--new_tokens", "9", "--repeats", "1"]
    argv += ["--vllm", "40x24", "--skip_floor"]
    monkeypatch.setattr(bench_decode.importlib.util, "find_spec", lambda name: None)
    assert bench_decode.main(argv) == 2
    assert capsys.readouterr().err == (
        "--vllm: vllm is not installed; leave it out, or pip install vllm\n"
    )
    monkeypatch.undo()
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert bench_decode.main(argv) == 0
    first, second = last_json(capsys)["rows"]
    assert first["vllm_ms"] is None and 9 < second["vllm_ms"] < 100


def test_bench_score_counts_useful_work(capsys):
    argv = ["--shape", "tiny", "--cases", "32x8x64", "--repeats", "1"]
    assert bench_score.main([*argv, "--from_start", "32x8x64"]) == 0
    (row,) = last_json(capsys)["rows"]
    assert row["mean_answer_tokens"] == 64 and row["transformers_padded_share"] == 0
    flop = 2 * bench_score.SHAPES["tiny"].num_layer_params * (32 + 8 * 64)
    assert row["useful_tflops"] == pytest.approx(flop / row["sec"] / 1e12)
    assert min(row["round_sec"], row["from_start_sec"], row["transformers_sec"]) > 0


def test_bench_score_reads_unequal_answers_that_the_classifier_pads(capsys, monkeypatch):
    """`~`: both sides read the same texts, of half to the full length."""
    read, seen = {}, []
    inner, twin = bench_score.Reader.read, bench_score.transformers_twin

    def note(reader, sequences, *given):
        read.update({i: ids.tolist() for i, ids in sequences.items()})
        return inner(reader, sequences, *given)

    def listening(*given, **more):
        made = twin(*given, **more)
        made.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args[0], kwargs["attention_mask"])),
            with_kwargs=True,
        )
        return made

    monkeypatch.setattr(bench_score.Reader, "read", note)
    monkeypatch.setattr(bench_score, "transformers_twin", listening)
    case = ["--shape", "tiny", "--repeats", "1", "--cases", "32x130x64~,32x8x64"]
    assert bench_score.main(case) == 0
    first, second = last_json(capsys)["rows"]
    assert "transformers_sec" not in second, "the first case alone, where nothing is said"
    assert first["transformers_sec"] > 0 and 0 < first["transformers_padded_share"] < 0.5
    assert 44 < first["mean_answer_tokens"] < 52
    bench = bench_score.Bench(bench_score.random_model("tiny", torch.float32, CPU), "32x130x64~",
                              bench_score.parse([*case, "--device", "cpu"]))  # fmt: skip
    assert bench.lengths.min() == 32 and bench.lengths.max() == 64
    tokens = 32 + int(bench.lengths.sum())
    flop = 2 * bench_score.SHAPES["tiny"].num_layer_params * tokens
    assert first["useful_tflops"] == pytest.approx(flop / first["sec"] / 1e12)
    texts = [
        ids[mask.bool()].tolist()
        for batch in seen[-2:]
        for ids, mask in zip(*batch, strict=True)
        if not bool((mask.diff() > 0).any())  # padded on the right
    ]
    assert texts == [bench.ids[i].tolist() for i in range(130)]
    assert texts[8:] == [read[i] for i in range(8, 130)]  # 0 to 7: the second case came after


def test_bench_score_without_transformers(capsys):
    argv = ["--shape", "tiny", "--cases", "8x4x9", "--repeats", "1", "--transformers", "none"]
    assert bench_score.main(argv) == 0
    assert "transformers_sec" not in last_json(capsys)["rows"][0]


def test_bench_run_counts_tokens_of_both_methods(capsys):
    runs = ["--batch_size 12 --max_gen_tokens 40", "--speculative_rejection --kv_cache_gb 0.0008"]
    argv = ["--shape", "tiny", "--reward_shape", "tiny", "--prompt", "20", "--repeats", "0"]
    assert bench_run.main([*argv, "--runs", runs[0], f"{runs[1]} --max_gen_tokens 150"]) == 0
    best_of_n, rejection = last_json(capsys)["rows"]
    assert best_of_n["tokens_generated"] == 12 * 40
    assert best_of_n["tokens_scored"] == 20 + 12 * 41  # the prompt once, a turn's end each
    rows = [round_[0] for round_ in rejection["rounds"]]
    assert len(rows) > 1 and rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("cache", ["on", "off"])
def test_bench_run_repeats_a_run_that_starts_clean(capsys, cache):
    flags = "--speculative_rejection --kv_cache_gb 0.0008 --max_gen_tokens 150 --reward_cache"
    assert bench_run.main(["--shape", "tiny", "--prompt", "20", "--runs", f"{flags} {cache}"]) == 0
    (row,) = last_json(capsys)["rows"]
    assert row["kept_reward_cache"] == (cache == "on") and len(row["rounds"]) > 1
    for count in ("tokens_generated", "tokens_scored"):
        assert row[count] == row["first"][count] > 0
    assert row["capture_sec"] == row["first"]["capture_sec"] == 0.0, "a CPU records no graphs"
    assert max(row["text_wait_sec"], row["text_sec"]) < row["elapsed_sec"]


def test_bench_run_tells_the_seconds_of_text(capsys):
    argv = ["--shape", "smollm2-135m", "--reward_shape", "tiny", "--prompt", "9", "--repeats", "0"]
    assert bench_run.main([*argv, "--text", "--runs", "--batch_size 8 --max_gen_tokens 3"]) == 0
    (row,) = last_json(capsys)["rows"]
    assert 0 < min(row["text_wait_sec"], row["text_sec"]) < row["elapsed_sec"] / 2


RUN = "--batch_size 2 --max_gen_tokens 3"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--shape", "nope", "--runs", RUN], "invalid choice: 'nope' (choose from 'llama-3-8b'"),
        (["--text", "--runs", RUN], "--text needs a --shape with 49152 tokens or more, got tiny"),
        (["--repeats", "-1", "--runs", RUN], "--repeats must be at least 0, got -1"),
        (["--prompt", "0", "--runs", RUN], "--prompt must be at least 1, got 0"),
        (["--prompt", "2048", "--runs", RUN], f"less than the 2048 tokens .* '{RUN}', got 2048"),
        (["--prompt", "4096", "--runs", f"{RUN} --max_tokens 9999"], "less than the 4096 tokens"),
        (["--device", "foo", "--runs", RUN], "--device must be cpu or cuda, got 'foo'"),
        (["--device", "cuda:99", "--runs", RUN], "--device must be cpu or one of .* 'cuda:99'"),
        (["--runs"], "--runs needs flags of main.py, quoted, one text a run, got none"),
        (["--runs", RUN, ""], "--runs '': holds no flag; --batch_size 20 is what"),
        (["--runs", RUN, "--nope 3"], "--runs '--nope 3': unrecognized arguments: --nope 3"),
        (["--runs", "--batch_size x"], "--batch_size must be an integer .*, got 'x'; it is N"),
        (["--runs", "--seed"], "--runs '--seed': --seed expected one argument, got none; give"),
        (["--runs", "--dtype 'x"], "No closing quotation"),
        (["--runs", f"{RUN} -h"], "asks for main.py's help"),
        (["--runs", "--batch_size 0"], "--batch_size must be"),
        (["--runs", f"{RUN} --log_hidden"], "--log_hidden is about files or models that a run"),
        (["--runs", f"{RUN} --kv_cache_gb 1e-9"], "hold one row of 3 .*, got 1e-09; raise it"),
        (["--runs", f"{RUN} --kv_cache_gb 999999"], "must fit beside .*, got 999999; lower it"),
    ],
)
def test_bench_run_refuses_what_is_none_before_it_builds(capsys, monkeypatch, flags, expected):
    def build(*given, **more):
        raise AssertionError("a model was built")

    monkeypatch.setattr(bench_run, "random_model", build)
    with pytest.raises(SystemExit) as refused:
        bench_run.main(["--shape", "tiny", *flags])
    errors = capsys.readouterr().err
    assert refused.value.code == 2 and errors.count("\n") == 1
    assert errors.startswith("bench_run.py: error: ") and re.search(
        re.escape(expected).replace(r"\.\*", ".*"), errors
    )


def test_bench_run_names_a_budget_that_the_reward_models_cache_makes_too_small(capsys):
    run = "--speculative_rejection --max_gen_tokens 60 --kv_cache_gb 0.000035 --reward_cache"
    argv = ["--shape", "tiny", "--prompt", "9", "--repeats", "0", "--runs"]
    assert bench_run.main([*argv, f"{run} on"]) == 2
    assert "--kv_cache_gb 3.5e-05 is too small" in capsys.readouterr().err
    assert bench_run.main([*argv, f"{run} off"]) == 0


def test_bench_run_takes_a_run_of_one_flag():
    """As its own help has it: what is no flag of the benchmark belongs to a run."""
    argv = ["--runs", "--batch_size 2", "--speculative_rejection", "--repeats", "0"]
    args = bench_run.parse(["--shape", "tiny", *argv])
    assert args.runs == ["--batch_size 2", "--speculative_rejection"] and args.repeats == 0
    assert [settings.speculative_rejection for settings in args.settings] == [False, True]


def test_bench_rejection_times_drops_and_forks(capsys):
    assert bench_rejection.main(["--shape", "tiny", "--rows", "40", "--tokens", "50"]) == 0
    assert last_json(capsys)["fork_ms"] > 0
