"""The experiment's pictures, under OUT/imgs: cost against score in each account, and by postprocess
the saw-tooth of memory and partial against final scores of the prompts that are kept in full."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.experiment_accounts import ACCOUNTS
from postprocess import pictures, plot_memory, plot_partial

if TYPE_CHECKING:
    from benchmarks.experiment_report import Report

LABELS = {
    "paper": "GPU-seconds a prompt, Best-of-N in waves (paper)",
    "packed": "seconds a prompt, Best-of-N packed",
    "tokens": "tokens a prompt, generated + scored",
}


def draw_all(report: Report, out: Path) -> list[Path]:
    """Paths of what was drawn."""
    paths = _accounts(report, out / "imgs")
    if any((out / "full").glob("*/*_prompt_*.json")):
        for script in (plot_memory, plot_partial):
            with contextlib.redirect_stdout(io.StringIO()):  # the report has its own tables
                script.main([str(out / "full"), "--out", str(out / "imgs")])
        paths += sorted((out / "imgs").glob("*_*.png"))
    return paths


def _accounts(report: Report, folder: Path) -> list[Path]:
    """One panel an account; without timed waves only tokens."""
    base, methods = report.base, report.methods
    found = {account: base.curve(account, base.everyone) for account in ACCOUNTS}
    curves = {key: list(zip(x[0], y[0], strict=True)) for key, (x, y) in found.items()}
    shown = [account for account in ACCOUNTS if len(curves[account]) > 1]
    plt = pictures.start(False)
    figure, axes = plt.subplots(
        1, len(shown), figsize=(5.6 * len(shown), 4.4), squeeze=False, sharey=True
    )
    for ax, account in zip(axes[0], shown, strict=True):
        points = {
            "Bo": curves[account],
            "SpR": [(m.costs(account).mean(), m.scores.mean()) for m in methods],
        }
        for kind, pairs in points.items():
            color, marker = pictures.STYLES[kind]
            x, y = zip(*pairs, strict=True)
            line = "--" if kind == "Bo" else ""  # alphas are no curve of cost
            ax.plot(x, y, marker=marker, color=color, linestyle=line, label=pictures.NAMES[kind])
        low = min(min(y for _, y in points["SpR"]), 90) - 2
        ax.set_ylim(bottom=low)
        pictures.log_axis(ax, [x for pairs in points.values() for x, y in pairs if y >= low])
        names = [method.name for method in methods]
        color = pictures.STYLES["SpR"][0]
        pictures.place_labels(ax, points["SpR"], names, [color] * len(names))
        ax.set_xlabel(LABELS[account])
    axes[0][0].set_ylabel("score (the pool's best = 100)")
    axes[0][0].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    return pictures.save(figure, folder, "accounts", False)
