"""The archive of the paper's experiment that the project publishes: complete, and as reported."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest

from benchmarks.experiment_lines import Archive
from benchmarks.experiment_plan import FILES, Size, groups, tasks
from benchmarks.experiment_report import Report
from suite.settings import PROJECT, Settings

FOLDER = PROJECT / "benchmarks/results/experiment"
LARGEST = 30_000_000  # bytes


@pytest.fixture(scope="module")
def archive():
    return Archive(FOLDER)


def test_every_task_of_the_full_size_is_there(archive):
    """100 prompts with all that the script's defaults ask for (chunks only order a run); no prompt
    and no row failed; small enough for a clone."""
    size, settings = Size(), archive.settings()
    wanted = json.loads(json.dumps(asdict(size)))
    assert {key for key in wanted if settings[key] != wanted[key]} <= {"chunk_prompts"}
    planned = tasks(groups(size, Settings(max_gen_tokens=1024)), 100, size.chunk_prompts)
    assert Counter(name for _, name in archive.done) == Counter(c.name for _, c in planned)
    by_name: dict[str, set[int]] = {}
    for idx, name in archive.done:
        by_name.setdefault(name, set()).add(idx)
    assert len({frozenset(places) for places in by_name.values()}) == 3, "all, timed, side"
    lines = sum(len(archive.path(file).read_text().splitlines()) for file in FILES)
    assert lines == len(archive.done), "none twice, none damaged"
    for line in archive.done.values():
        assert line["num_failed_rows"] == 0 and line["out_of_memory_splits"] == 0
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= LARGEST


def test_what_is_reported_comes_out_of_the_archive(archive):
    """The report to the letter, with its intervals; its tables in the manual; the README's rows."""
    report = Report(archive)
    text = report.text()
    assert text == (FOLDER / "report.md").read_text(encoding="utf-8")
    manual = (PROJECT / "docs/experiment.md").read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith(("|", "- "))]
    assert len(tables) > 50 and [line for line in tables if line not in manual] == []
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    rows = [readme_row(method) for method in report.numbers["rejection"]]
    assert len(rows) == 9 and [row for row in rows if row not in readme] == []


def readme_row(method: dict) -> str:
    low, high = method["interval"]
    factors = [method[f"speedup_{account}"] for account in ("paper", "packed", "tokens")]
    cells = [f"alpha {method['alpha']:g}", f"{method['score']:.1f} ({low:.1f} to {high:.1f})"]
    for sign, middle, (low, high) in factors:
        cells.append(f"{sign}{short(middle)} ({short(low)} to {short(high)})")
    return f"| {' | '.join(cells)} |"


def short(factor: float) -> str:
    return f"{factor:.2f}" if factor < 1 else f"{factor:.1f}"
