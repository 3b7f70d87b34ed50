"""Runs alpaca_eval's judge and metrics in a process of its own; win_rate.py is the front.

alpaca_eval reads its environment at import, logs to the root logger and keeps judgements inside
site-packages, so it never runs in our process: `python postprocess/judging.py JOB.json` does one
job with a clean environment, a cache of its own and data frames made here (its own file loader
turns all-numeric answers into numbers). The key travels in the environment alone and is blotted
out of everything that comes back. The invariant: nothing is written outside the job's folders.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from postprocess.command import Refused, dump, write_text
from postprocess.reading import BadFile, finite, load_json, shown

ALPACA_EVAL = "0.6.6"
OPENAI_ANNOTATOR = "weighted_alpaca_eval_gpt4_turbo"
OPENAI_MODEL = "gpt-4-1106-preview"
# Whatever else could send the judge's calls elsewhere than --judge_url says.
REDIRECTS = ("OPENAI_CLIENT_CONFIG_PATH", "OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_API_KEYS")
HUB_REPO = "datasets--tatsu-lab--alpaca_eval"
GAMED_COLUMNS = (
    *("index", "preference", "std_delta_len", "instruction_difficulty"),
    *("not_gamed_baseline", "model"),
)
RATES = ("win_rate", "length_controlled_winrate")
CACHE_KEYS = ("instruction", "output_1", "output_2", "annotator")
# alpaca_eval fills its prompt by replacing these in order, and cuts it at the turn marks: as text
# in an answer they would swallow the other answer or end the prompt.
MARKS = re.compile(r"<\|(?=im_start\|>|im_end\|>)|\{(?=(?:instruction|output_1|output_2)\})")


@dataclass(frozen=True, slots=True)
class Job:
    """A compare file and its reference. `preferences` (1 reference, 2 method) need no judge."""

    compare: str
    reference: str
    folder: str
    length_controlled: bool
    cache: str | None = None
    judge_model: str | None = None
    judge_url: str | None = None
    annotator: str = ""
    preferences: dict[str, list[float]] | None = None


def environment(
    job: Job, key: str | None, hub_cache: Path | None, own: Mapping[str, str]
) -> dict[str, str]:
    """The child's environment: one judge, one key, and the hub's cache where df_gamed.csv lies."""
    env = dict(own)
    if job.judge_url is not None:
        for name in REDIRECTS:
            env.pop(name, None)
    if key is not None:
        env["OPENAI_API_KEY"] = key
    if job.preferences is not None:  # judged offline: nothing is asked of a network
        env.pop("OPENAI_API_KEY", None)
        env["HF_HUB_OFFLINE"] = "1"
    if hub_cache is not None:
        env |= {"HF_HUB_CACHE": str(hub_cache), "HF_HUB_OFFLINE": "1"}
    return env | {"IS_ALPACA_EVAL_2": "True", "PYTHONUNBUFFERED": "1"}


def run_job(
    job: Job, key: str | None = None, hub_cache: Path | None = None
) -> list[dict[str, Any]]:
    """Runs the job in a child: one row of metrics a generator; its log is judge.log."""
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path, result, log = folder / "job.json", folder / "metrics.json", folder / "judge.log"
    result.unlink(missing_ok=True)
    write_text(path, dump(asdict(job)))
    env = environment(job, key, hub_cache, os.environ)
    secrets = [env.get(name, "") for name in ("OPENAI_API_KEY", "OPENAI_API_KEYS")]
    secrets = ",".join(secrets).split(",")
    command = [sys.executable, str(Path(__file__).resolve()), str(path)]
    with (
        log.open("w", encoding="utf-8") as out,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
        ) as child,
    ):
        assert child.stdout is not None, "the child's output is a pipe"
        for line in child.stdout:
            out.write(redact(line.decode("utf-8", errors="replace"), secrets))
    path.unlink(missing_ok=True)
    if child.returncode or not result.is_file():
        text = f"alpaca_eval failed (exit code {child.returncode}): {_reason(log)}"
        raise Refused(f"{text}; all of it: {log}")
    return checked_metrics(load_json(result), result)


def checked_metrics(rows: Any, path: Path) -> list[dict[str, Any]]:
    """One row a generator, of numbers that can be printed; Refused names what is none."""
    where = f"{path}: not the judge's metrics"
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Refused(f"{where}, want a list of objects")
    names = [row.get("generator") for row in rows]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise Refused(f"{where}, want each generator once")
    for row in rows:
        for key, value in row.items():
            if key != "generator" and value is not None and finite(value) is None:
                raise Refused(f"{where}: {shown(key)}: want a number, got {shown(value)}")
        total = row.get("n_total")
        if total is None or total < 0 or total != int(total) or row.get("avg_length") is None:
            raise Refused(f"{where}: n_total or avg_length is missing")
        rates = [row.get(key) for key in RATES]
        if (total and rates[0] is None) or any(r is not None and not 0 <= r <= 100 for r in rates):
            raise Refused(f"{where}: want win rates from 0 to 100, got {shown(rates)}")
    return rows


def redact(text: str, secrets: Sequence[str]) -> str:
    """The text without the keys, also where a server sent one back."""
    for secret in sorted((s.strip() for s in secrets), key=len, reverse=True):
        text = text.replace(secret, "[key]") if len(secret) > 4 else text
    return text


def _reason(log: Path) -> str:
    """The last exception in the log, else its last line."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return (named or lines or ["no output"])[-1][:400]


def hub_cache_of(gamed: Path, folder: Path) -> Path:
    """A hub cache with this df_gamed.csv in it, where alpaca_eval looks for it."""
    head = gamed.open(encoding="utf-8").readline().strip().split(",")
    if missing := [name for name in GAMED_COLUMNS if name not in head]:
        text = f"columns {', '.join(missing)} are missing"
        raise Refused(f"{gamed}: not alpaca_eval's df_gamed.csv, {text}")
    revision = "0" * 40
    repo = folder / "hub" / HUB_REPO
    write_text(repo / "refs" / "main", revision)
    write_text(repo / "snapshots" / revision / "df_gamed.csv", gamed.read_text(encoding="utf-8"))
    return folder / "hub"


def fetch_gamed(only_cached: bool = False) -> str | None:
    """Gets df_gamed.csv into the hub's cache; what is wrong when that fails.

    Before any judging: alpaca_eval fetches it afterwards, when the judge has been paid.
    `only_cached` asks no network.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    file = {"repo_id": "tatsu-lab/alpaca_eval", "filename": "df_gamed.csv", "repo_type": "dataset"}
    if only_cached:
        if isinstance(try_to_load_from_cache(**file), str):
            return None
        return "df_gamed.csv is not in the hub's cache, and an offline judge asks no network"
    try:
        hf_hub_download(**file)
    except (OSError, HfHubHTTPError) as error:
        return f"df_gamed.csv is neither in the hub's cache nor on the hub ({type(error).__name__})"
    return None


def harmless(text: str) -> str:
    """A space after `<|` or `{` where alpaca_eval would take the text for its own marks."""
    return MARKS.sub(lambda match: match[0] + " ", text)


# What follows runs in the child.


def judge(job: Job) -> list[dict[str, Any]]:
    """Judges every generator and writes its annotations under its own folder."""
    import alpaca_eval
    import pandas as pd

    version = getattr(alpaca_eval, "__version__", ALPACA_EVAL)
    if version != ALPACA_EVAL:
        print(f"WARNING: written for alpaca_eval {ALPACA_EVAL}, this is {version}")
    reference = pd.DataFrame.from_records(_rows(job.reference))
    compare = pd.DataFrame.from_records(_rows(job.compare))
    rows = []
    for name in compare["generator"].unique():
        model = compare[compare["generator"] == name].reset_index(drop=True)
        if job.preferences is None:
            annotations = _ask(job, model, reference)
        else:
            annotations = _given(job, name, model, reference)
        folder = Path(job.folder) / name
        frame = pd.DataFrame.from_records(annotations)
        write_text(folder / "annotations.json", frame.to_json(orient="records", indent=2))
        rows.append({"generator": name, **_metrics(job, frame), **_lengths(model)})
    return rows


def _rows(path: str) -> list[dict[str, str]]:
    kept = ("instruction", "output", "generator")
    rows = load_json(Path(path))
    changed = sum(harmless(row[key]) != row[key] for row in rows for key in kept)
    if changed:
        print(f"WARNING: {Path(path).name}: {changed} texts held alpaca_eval's own marks")
    return [{key: harmless(row[key]) for key in kept} for row in rows]


def _ask(job: Job, model: Any, reference: Any) -> list[dict[str, Any]]:
    """Judgements for one generator."""
    from alpaca_eval.annotators import PairwiseAnnotator

    assert job.cache is not None, "a judge has a cache"
    forget_failures(Path(job.cache))
    annotator = PairwiseAnnotator(
        annotators_config=job.annotator if job.judge_url is None else _own_annotator(job),
        caching_path=job.cache,
    )
    return annotator.annotate_head2head(outputs_1=reference, outputs_2=model)


def forget_failures(cache: Path) -> None:
    """Drops judgements that failed (-1): alpaca_eval keeps them and would never ask again.

    Its own switch for that, is_store_missing_annotations=False, breaks on an empty cache.
    """
    try:
        rows = load_json(cache) if cache.is_file() else []
        if not isinstance(rows, list):
            raise BadFile(f"{shown(cache.name)}: want a list of judgements")
    except BadFile as error:
        raise BadFile(f"{error}; --fresh begins a new cache") from error
    kept = [row for row in rows if _is_judgement(row)]
    if kept:
        write_text(cache, dump(kept))
    else:
        cache.unlink(missing_ok=True)


def _is_judgement(row: Any) -> bool:
    """Whole, and no failure."""
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in CACHE_KEYS):
        return False
    preference = finite(row.get("preference"))
    return preference is not None and 0 <= preference <= 2


def _own_annotator(job: Job) -> str:
    """The published annotator with another model behind another address."""
    import yaml
    from alpaca_eval import constants

    published = constants.EVALUATORS_CONFIG_DIR / OPENAI_ANNOTATOR / "configs.yaml"
    config = yaml.safe_load(published.read_text(encoding="utf-8"))[OPENAI_ANNOTATOR]
    config["prompt_template"] = str(constants.EVALUATORS_CONFIG_DIR / config["prompt_template"])
    clients = Path(job.folder) / "clients.yaml"
    write_text(clients, yaml.safe_dump({"default": [{"base_url": job.judge_url}]}))
    config["completions_kwargs"] |= {
        "model_name": job.judge_model,
        "client_config_path": str(clients),
        # By its name alone alpaca_eval takes "...-instruct" for a completion model.
        "requires_chatml": True,
    }
    folder = Path(job.folder) / "annotators" / job.annotator
    write_text(folder / "configs.yaml", yaml.safe_dump({job.annotator: config}))
    return str(folder)


def _given(job: Job, name: str, model: Any, reference: Any) -> list[dict[str, Any]]:
    """Preferences worked out without a judge, in alpaca_eval's form, in the reference's order."""
    assert job.preferences is not None, "only for jobs with preferences"
    outputs = dict(zip(model["instruction"], model["output"], strict=True))
    return [
        {
            "instruction": row.instruction,
            "output_1": row.output,
            "generator_1": row.generator,
            "output_2": outputs[row.instruction],
            "generator_2": name,
            "annotator": job.annotator,
            "preference": preference,
        }
        for row, preference in zip(reference.itertuples(), job.preferences[name], strict=True)
    ]


def _metrics(job: Job, frame: Any) -> dict[str, Any]:
    from alpaca_eval import metrics

    if job.length_controlled:
        found = metrics.get_length_controlled_winrate(frame, save_weights_dir=None)
    else:
        found = metrics.get_winrate(frame)
    return {key: None if value != value else float(value) for key, value in found.items()}


def _lengths(model: Any) -> dict[str, float]:
    return {"avg_length": float(model["output"].str.len().mean())}


def main(argv: Sequence[str] | None = None) -> int:
    import warnings

    (path,) = sys.argv[1:] if argv is None else argv
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    warnings.simplefilter("ignore", FutureWarning)
    write_text(Path(job.folder) / "metrics.json", dump(judge(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
