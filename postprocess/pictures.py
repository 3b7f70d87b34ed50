"""What the pictures share: the Agg backend, colours, label placing, PNG and PDF beside each other.

matplotlib is imported inside the functions: tables and checks must not wait for it, and --show
needs another backend. Nothing is drawn here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from postprocess.command import add_out, naming

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# Colour-blind safe (Okabe and Ito), also apart in grey through their markers.
STYLES = {"Bo": ("#0072B2", "o"), "SpR": ("#D55E00", "s"), "SpRF": ("#009E73", "^")}
NAMES = {"Bo": "Best-of-N", "SpR": "Speculative Rejection", "SpRF": "with refill"}
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
NEAR = 6  # points between a point and its label
PARTS = (1, 1.25, 1.5, 1.75)  # of an octave, for narrow axes


def start(show: bool):
    """pyplot, on a display only when --show asks for it."""
    import matplotlib

    if not show:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.grid": True,
            "grid.color": "#e0e0e0",
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "pdf.fonttype": 42,
        }
    )
    return plt


def add_options(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "imgs")
    parser.add_argument("--title", help="instead of the models' names")
    parser.add_argument("--show", action="store_true", help="open a window as well")


def save(figure: Figure, folder: Path, stem: str, show: bool) -> list[Path]:
    """`stem`.png and `stem`.pdf; without a date inside, so the same data gives the same file."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.png", folder / f"{stem}.pdf"]
    with naming(paths[0]):
        figure.savefig(paths[0], dpi=150, bbox_inches="tight", metadata={"Software": None})
    with naming(paths[1]):
        figure.savefig(paths[1], bbox_inches="tight", metadata={"CreationDate": None})
    if show:
        plt.show()
    plt.close(figure)
    return paths


def log_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis with at most nine ticks at powers of two, written as numbers."""
    low, high = min(values), max(values)
    pad = max((high / low) ** 0.12, 1.25)
    axes.set_xscale("log", base=2)
    first, last = math.floor(math.log2(low / pad)), math.ceil(math.log2(high * pad))
    step = max(1, math.ceil((last - first) / 8))
    ticks = [2.0**power for power in range(first, last + 1, step)]
    if sum(low / pad <= tick <= high * pad for tick in ticks) < 3:
        ticks = sorted(2.0**power * part for power in range(first, last) for part in PARTS)
    axes.set_xticks(ticks, [f"{tick:.{3 if tick < 1 else 9}g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low / pad, high * pad)  # last: ticks widen the limits


def place_labels(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    colors: Sequence[str],
) -> None:
    """A label beside each point where it hides neither a point, a line, the legend nor a label.

    Tries the places around the point, near ones first, and keeps the one with the least overlap;
    a white rim keeps it legible where a line must pass below.
    """
    from matplotlib.patheffects import withStroke

    rim = [withStroke(linewidth=2, foreground="white")]
    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    radius = 5 * figure.dpi / 72
    taken = [_around(axes.transData.transform(point), radius) for point in points]
    lines = [line.get_xydata() for line in axes.lines]
    bars = [stroke for found in axes.collections for stroke in found.get_segments()]
    drawn, faint = (
        [_around(spot, radius / 4) for stroke in strokes for spot in _along(stroke, axes)]
        for strokes in (lines, bars)
    )
    if axes.get_legend():
        taken.append(tuple(axes.get_legend().get_window_extent(renderer).extents))
    frame = axes.get_window_extent(renderer)
    for point, label, color in zip(points, labels, colors, strict=True):
        text = axes.annotate(label, point, (0, 0), textcoords="offset points", fontsize=8)
        text.set(color=color, path_effects=rim)
        best = (math.inf, _places()[0], (0.0, 0.0, 0.0, 0.0))
        for place in _places():
            _move(text, place)
            box = text.get_window_extent(renderer).extents
            cost = sum(_overlap(box, other) for other in taken) + _outside(box, frame)
            cost += sum(_overlap(box, other) for other in drawn) / 4
            cost += sum(_overlap(box, other) for other in faint) / 16
            cost += 4 * (math.hypot(*place[0]) - NEAR)  # far from its point it is read as another's
            if cost < best[0]:
                best = (cost, place, tuple(box))
        _move(text, best[1])
        taken.append(best[2])


def _move(text: Annotation, place: tuple[tuple[int, int], str, str]) -> None:
    text.set_position(place[0])
    text.set_horizontalalignment(place[1])
    text.set_verticalalignment(place[2])


def _along(stroke: np.ndarray, axes: Axes) -> Iterable[tuple[float, float]]:
    """Spots every few pixels along a drawn line."""
    corners = axes.transData.transform(stroke)
    for start_at, end_at in zip(corners, corners[1:], strict=False):
        count = max(2, int(max(abs(end_at - start_at)) / 6))
        for step in range(count + 1):
            yield tuple(start_at + (end_at - start_at) * step / count)


def _around(spot: Sequence[float], radius: float) -> tuple[float, float, float, float]:
    return (spot[0] - radius, spot[1] - radius, spot[0] + radius, spot[1] + radius)


def _places() -> list[tuple[tuple[int, int], str, str]]:
    """Offsets in points with their alignment: around the point, then the same further out."""
    around = [(0, 1), (0, -1), (-1, 1), (1, -1), (1, 1), (-1, -1), (-1, 0), (1, 0)]
    horizontal, vertical = (
        {0: "center", 1: "left", -1: "right"},
        {0: "center", 1: "bottom", -1: "top"},
    )
    return [
        ((x * size, y * size), horizontal[x], vertical[y])
        for size in (NEAR, 10, 15, 20)
        for x, y in around
    ]


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0)


def _outside(box: Sequence[float], frame: Bbox) -> float:
    inside = _overlap(box, (frame.x0, frame.y0, frame.x1, frame.y1))
    return (box[2] - box[0]) * (box[3] - box[1]) - inside
