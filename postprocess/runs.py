"""Finds, names and loads the runs of an archive; every script of this folder goes through here.

A run is a folder with one `<llm>_<reward>_prompt_<JSON_idx>.json` a prompt, or with no more than
failures.jsonl where every prompt failed. Method, N, alpha and models come from the fields of the
files; folder names are the fallback for files that lack them.
A file that can't be used is a `Problem` of its run and never ends a script. Other files are
ignored. The invariant: every prompt of a loaded run was made with the same settings; a folder
that mixes settings has no usable prompts, only problems.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postprocess.command import LOG, Nothing, Refused
from postprocess.reading import (
    MAX_SCORE,
    BadFile,
    PromptResult,
    differences,
    finite,
    is_name,
    read_prompt,
    shown,
)
from suite.records import FAILURES
from suite.settings import base_name

PROMPT_FILE = re.compile(r".*_prompt_(\d{1,18})\.json")
# Bo120_<llm>_<reward>_0, SpR_alpha_0.5_..., SpRF_alpha_auto_...
FOLDER = re.compile(
    r"(?:Bo(?P<n>\d{1,9})|(?P<spr>SpRF?)_alpha_(?P<alpha>[0-9.]+|auto))"
    r"_(?P<models>.+)_(?P<seed>\d{1,18})"
)
# The paper's Best-of-N ran 120 rows on each GPU. Only used for files that do not tell their
# processes apart.
PAPER_ROWS_A_GPU = 120
NO_SCORE = f"no finite score (beyond {MAX_SCORE:g} on either side counts as none)"


@dataclass(frozen=True, slots=True)
class Method:
    """How the answers of a run were made. `n` counts Best-of-N candidates over all processes."""

    kind: str  # "Bo", "SpR" or "SpRF"
    n: int | None = None
    alpha: float | str | None = None
    extra: str = ""

    @property
    def label(self) -> str:
        """Beside a point of a plot: N or alpha."""
        value = str(self.n) if self.kind == "Bo" else alpha_text(self.alpha)
        return value + self.extra.replace("_", " ")

    @property
    def name(self) -> str:
        """In tables, files and as alpaca_eval's generator: `Bo120`, `SpR_alpha_0.5`, `SpRF_...`."""
        head = f"Bo{self.n}" if self.kind == "Bo" else f"{self.kind}_alpha_{alpha_text(self.alpha)}"
        return head + self.extra


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a run: `kind` is unreadable, mixed, unscored, skipped or failed."""

    kind: str
    text: str


@dataclass(slots=True)
class Run:
    folder: Path
    method: Method
    llm: str
    reward: str
    seed: int
    prompts: dict[int, PromptResult] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def pair(self) -> str:
        return f"{self.llm}_{self.reward}"

    @property
    def name(self) -> str:
        return f"{self.method.name}_{self.pair}_{self.seed}"

    @property
    def merged(self) -> bool:
        return any(result.merged for result in self.prompts.values())

    @property
    def num_gpus(self) -> int:
        """The commonest count over prompts (they agree unless the folder is mixed)."""
        counts = Counter(self.gpus_of(result) for result in self.prompts.values())
        return counts.most_common(1)[0][0] if counts else 1

    def gpus_of(self, result: PromptResult) -> int:
        """One GPU an object; where one object holds the answers of several, N by rows a GPU."""
        rows_a_gpu = result.batch_sizes[0] or PAPER_ROWS_A_GPU
        if result.num_objects > 1 or self.method.n is None or result.num_trajectories <= rows_a_gpu:
            return result.num_objects
        return max(1, -(-self.method.n // rows_a_gpu))


def alpha_text(alpha: float | str | None) -> str:
    return alpha if isinstance(alpha, str) else f"{alpha:g}"


def prompt_files(folder: Path) -> list[Path]:
    """The files of a run by name; anything else in the folder is not ours."""
    try:
        return sorted(path for path in folder.iterdir() if PROMPT_FILE.fullmatch(path.name))
    except OSError as error:
        raise Nothing(f"{shown(folder)}: can't be listed ({error.strerror or error})") from error


def find_folders(places: Sequence[Path]) -> list[Path]:
    """Run folders among `places`: each is a run itself, or holds runs.

    Runs lie one level down; only where there are none, two (archive/demo/ alone in the archive).
    A folder of nothing but failures is found beside them; it does not decide the level.
    """
    found: list[Path] = []
    for place in places:
        if not place.is_dir():
            raise Nothing(
                f"no folder {shown(place)}; main.py --output_folder archive/... makes one"
            )
        if prompt_files(place):
            found.append(place)
            continue
        inner = _subfolders(place)
        if not (runs := set(_runs_among(inner))):
            inner += [folder for sub in inner for folder in _subfolders(sub)]
            runs = set(_runs_among(inner))
        failed = {folder for folder in (place, *inner) if os.path.isfile(folder / FAILURES)}
        found += [folder for folder in (place, *inner) if folder in runs | failed]
    if not found:
        raise Nothing(
            f"no runs in {', '.join(shown(place) for place in places)}: looked for folders with"
            " <llm>_<reward>_prompt_<JSON_idx>.json, as main.py writes them"
        )
    return list(dict.fromkeys(found))


def passed_over(places: Sequence[Path], found: Sequence[Path]) -> list[Path]:
    """Runs up to two levels below `places` that `find_folders` left out for nearer ones."""
    taken = {folder.resolve() for folder in found}
    below = [sub for place in places for sub in _subfolders(place)]
    below += [deeper for sub in below for deeper in _subfolders(sub)]
    return [folder for folder in _runs_among(below) if folder.resolve() not in taken]


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [sub for sub in sorted(folder.iterdir()) if sub.is_dir() and sub.name[0] != "."]
    except OSError as error:
        raise Nothing(f"{shown(folder)}: can't be listed ({error.strerror or error})") from error


def _runs_among(folders: Sequence[Path]) -> list[Path]:
    return [folder for folder in folders if FOLDER.fullmatch(folder.name) or prompt_files(folder)]


def load_run(folder: Path) -> Run:
    """Reads every prompt of a folder; faults become problems."""
    results: dict[int, PromptResult] = {}
    problems: list[Problem] = []
    paths = prompt_files(folder)
    for path in paths:
        try:
            result = read_prompt(path)
        except BadFile as error:
            problems.append(Problem("unreadable", str(error)))
            continue
        if result.json_idx in results:
            other = shown(results[result.json_idx].path.name)
            text = f"{shown(path.name)}: JSON_idx {result.json_idx} is in {other} too"
            problems.append(Problem("mixed", text))
            continue
        results[result.json_idx] = result
    problems += _failures(folder)
    try:
        run = _name_run(folder, list(results.values()))
    except BadFile as error:
        if paths or not problems:  # else every prompt failed: no file is there to tell a name
            problems.append(Problem("mixed", str(error)))
        return Run(folder, Method("?"), "?", "?", 0, {}, problems)
    mixed = _mixed(run, list(results.values()))
    run.problems = problems + mixed
    if not mixed:
        usable = [result for result in results.values() if _usable(result, run.problems)]
        run.prompts = {result.json_idx: result for result in sorted(usable, key=_index)}
    return run


def load_runs(places: Sequence[Path]) -> list[Run]:
    """All usable runs, each problem logged as a warning."""
    runs = [load_run(folder) for folder in find_folders(places)]
    for run in runs:
        for problem in run.problems:
            LOG.warning("%s: %s: %s", shown(run.folder.name), problem.kind, problem.text)
        if not run.prompts:
            LOG.warning("%s: left out, no usable prompt", shown(run.folder.name))
    usable = [run for run in runs if run.prompts]
    if not usable:
        raise Refused(f"none of {len(runs)} runs has a usable prompt; check.py lists what is wrong")
    return sorted(usable, key=_order)


def by_pair(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs grouped by (generator, reward)."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.pair, []).append(run)
    return groups


def one_of_each(runs: Sequence[Run], wanted: str | None = None) -> list[Run]:
    """Of runs with one method, models and seed the first by folder counts, or the folder `wanted`.

    The others are errors: a caller that gets fewer runs than it gave ends with exit code 1.
    """
    first: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.folder.name != wanted):
        other = first.setdefault(run.name, run)
        if other is not run:
            LOG.error(
                "%s: left out, %s has the same method, models and seed; name one of them",
                *(shown(run.folder, 300), shown(other.folder, 300)),
            )
    return [run for run in runs if first[run.name] is run]


def choose_base(runs: Sequence[Run], wanted: str | None) -> Run:
    """The one named, or the largest Best-of-N (then most prompts, then lowest seed)."""
    if wanted is not None:
        matches = [run for run in runs if wanted in (run.method.name, run.name, run.folder.name)]
        if not matches:
            there = ", ".join(run.name for run in runs)
            raise Refused(f"--base {shown(wanted)}: no such run; there is {there}")
        return matches[0]
    candidates = [run for run in runs if run.method.kind == "Bo"]
    if not candidates:
        raise Refused(f"{runs[0].pair}: no Best-of-N run to be the base; name a run with --base")
    return max(candidates, key=lambda run: (run.method.n or 0, len(run.prompts), -run.seed))


def _order(run: Run) -> tuple[Any, ...]:
    method, alpha = run.method, run.method.alpha
    place = (method.n or 0, math.inf if isinstance(alpha, str) else alpha or 0)
    return (run.pair, method.kind, *place, method.name, run.seed, str(run.folder))


def _index(result: PromptResult) -> int:
    return result.json_idx


def _usable(result: PromptResult, problems: list[Problem]) -> bool:
    name = shown(result.path.name)
    if result.skipped is not None:
        problems.append(Problem("skipped", f"{name}: {shown(result.skipped)}"))
        return False
    if result.num_unscored:
        share = f"{result.num_unscored} of {result.num_trajectories} trajectories"
        problems.append(Problem("unscored", f"{name}: {share} ignored, {NO_SCORE}"))
    if result.best is None and not result.num_unscored:
        problems.append(Problem("unscored", f"{name}: no trajectories"))
    return result.best is not None


def _failures(folder: Path) -> list[Problem]:
    """Prompts that failed and have no file: one line each in failures.jsonl."""
    path = folder / FAILURES
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return [Problem("unreadable", FAILURES)]
    return [Problem("failed", shown(line, 160)) for line in text.splitlines() if line.strip()]


def _mixed(run: Run, results: list[PromptResult]) -> list[Problem]:
    """Files made with other settings, or another number of processes, than the first."""
    problems = []
    for result in results[1:]:
        if differing := differences(results[0].settings, result.settings):
            text = f"other settings: {', '.join(differing)}"
        elif result.num_objects != results[0].num_objects:
            text = (
                f"{result.num_objects} objects, not {results[0].num_objects} as in the first file"
            )
        else:
            continue
        problems.append(Problem("mixed", f"{shown(result.path.name)}: {text}"))
    return problems


def _name_run(folder: Path, results: list[PromptResult]) -> Run:
    """Method, models and seed: by the fields of the first file, else by the folder's name."""
    match = FOLDER.fullmatch(folder.name)
    settings = results[0].settings if results else {}
    names = [settings.get("llm_name"), settings.get("reward_model_name")]
    if None in names:
        names = _models_in(match["models"] if match else "", folder)
    seed = results[0].seed if results else None
    if seed is None:
        seed = int(match["seed"]) if match else 0
    method = _method(settings, results, match, folder)
    return Run(folder, method, base_name(names[0]), base_name(names[1]), seed)


def _models_in(text: str, folder: Path) -> list[str]:
    """`<llm>_<reward>` taken apart: in the middle of `X_X`, else at the only underscore."""
    half = len(text) // 2
    parts = text.split("_")
    if len(text) % 2 and text[half] == "_" and text[:half] == text[half + 1 :]:
        parts = [text[:half], text[half + 1 :]]
    if len(parts) != 2 or not all(is_name(part) for part in parts):
        raise BadFile(
            f"{shown(folder.name)}: its files do not name their models, and the folder is not named"
            " Bo<N>_<llm>_<reward>_<seed> or SpR_alpha_<alpha>_<llm>_<reward>_<seed>"
        )
    return parts


def _method(
    settings: dict[str, Any], results: list[PromptResult], match: re.Match[str] | None, folder: Path
) -> Method:
    speculative = settings.get("speculative_rejection")
    if speculative is None:
        if match is None:
            raise BadFile(f"{shown(folder.name)}: neither its files nor its name tell the method")
        speculative = match["n"] is None
    if not speculative:
        return Method("Bo", n=_num_candidates(results, match, folder))
    alpha = settings.get("alpha")
    if settings.get("keep_fraction") is not None:
        alpha = 1 - settings["keep_fraction"]
    if alpha is None:
        if match is None or match["alpha"] is None:
            raise BadFile(f"{shown(folder.name)}: neither its files nor its name tell alpha")
        alpha = match["alpha"] if match["alpha"] == "auto" else _fraction(match["alpha"], folder)
    refill = settings.get("refill")
    if refill is None:
        refill = match is not None and match["spr"] == "SpRF"
    return Method("SpRF" if refill else "SpR", alpha=alpha, extra=_extra(settings))


def _fraction(text: str, folder: Path) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise BadFile(f"{shown(folder.name)}: alpha {shown(text)} is not a number") from error


def _num_candidates(results: list[PromptResult], match: re.Match[str] | None, folder: Path) -> int:
    sizes = results[0].batch_sizes if results else (None,)
    in_name = int(match["n"]) if match and match["n"] else None
    if None not in sizes and not (len(sizes) == 1 and results[0].num_trajectories > sizes[0]):  # type: ignore[operator]
        return sum(sizes)  # type: ignore[arg-type]
    number = in_name or max((result.num_trajectories for result in results), default=0)
    if not number:
        raise BadFile(f"{shown(folder.name)}: neither its files nor its name tell N")
    return number


def _extra(settings: dict[str, Any]) -> str:
    """What sets a Speculative Rejection apart beside alpha, where it is not the default."""
    schedule, floor = settings.get("schedule"), finite(settings.get("min_tokens"))
    parts = []
    if isinstance(schedule, str) and schedule != "memory":
        parts.append(re.sub(r"[^A-Za-z0-9]", "", schedule)[:20])
    if floor:
        parts.append(f"min{floor:g}")
    if settings.get("refill") and (share := finite(settings.get("refill_to"))) not in (None, 1.0):
        parts.append(f"to{share:g}")
    if settings.get("value_head"):
        parts.append("vh")
    return "".join(f"_{part}" for part in parts)
