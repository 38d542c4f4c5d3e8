"""Pictures of a run: figures over the epochs, and t-SNE of the embeddings."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ncd_serve.files import atomic_path
from ncd_serve.gallery.projection import tsne
from ncd_training.summary.figures import MAX_MARKED_POINTS, PAIRS, QUALITY, TERMS, Curve, EpochRow, curves

_MARKERS = "os^DvP"
# Dark colours first, then pale ones; no grey, the colour of the known classes.
COLOURS = [colormaps["tab20"](number) for shade in (0, 1) for number in range(shade, 20, 2) if number // 2 != 7]
_MAX_LEGEND_ENTRIES = 24
_REDRAW_SECONDS = 60.0


@dataclass(frozen=True)
class Points:
    """Embeddings of a t-SNE picture: unlabelled images with a group each, and known-class images as the background."""

    unlabelled: NDArray[np.float32]
    groups: NDArray[np.int64]
    names: Sequence[str]  # of the groups, by number; a group without a name is shown by its number
    known: NDArray[np.float32]


@dataclass(frozen=True)
class Bar:
    """Row of a comparison, in percent; unknown figures are None."""

    label: str
    mean: float | None
    deviation: float | None
    published: float | None


class CostPoint(NamedTuple):
    """Row of a comparison: mean time of a run, and ACC in percent with its deviation."""

    label: str
    minutes: float
    acc: float
    deviation: float | None


class CurvePlots:
    """Curves of a run that is training, redrawn at most once a minute: drawing takes a second."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._drawn = folder, time.monotonic()

    def follow(self, rows: Sequence[EpochRow]) -> None:
        """Draw all epochs so far, unless they were drawn less than a minute ago."""
        if time.monotonic() - self._drawn > _REDRAW_SECONDS:
            draw_curves(rows, self._folder)
            self._drawn = time.monotonic()


def draw_curves(rows: Sequence[EpochRow], folder: Path) -> None:
    """Write terms.png, quality.png and pseudo-labels.png, except those without figures."""
    for group, name in ((TERMS, "terms"), (QUALITY, "quality"), (PAIRS, "pseudo-labels")):
        if found := curves(rows, group):
            title = f"{PAIRS}, {QUALITY}" if group == PAIRS else group
            figure = Figure(figsize=(7, 4.2), layout="constrained")
            draw_group(title, found, figure.subplots())
            save_figure(figure, folder / f"{name}.png")


def draw_group(title: str, found: Sequence[Curve], axes: Axes) -> None:
    """Draw the curves of a group of figures."""
    for curve in found:
        axes.plot(
            *zip(*curve.points, strict=True),
            label=curve.name,
            color=f"C{curve.colour}",
            linestyle="--" if curve.dashed else "-",
            marker="." if len(curve.points) <= MAX_MARKED_POINTS else None,
        )
    axes.set(title=title, xlabel="epoch")
    if title == TERMS:
        # Terms differ by orders of magnitude, and a ramp-up starts at 0.
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_ylim(bottom=0)
    else:
        axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def draw_tsne(points: Points, *, title: str, seed: int, target: Path) -> None:
    """Draw unlabelled images in the colours of their groups, known-class images in grey behind them."""
    places = tsne(np.concatenate([points.unlabelled, points.known]), seed=seed)
    novel, known = places[: len(points.unlabelled)], places[len(points.unlabelled) :]
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(known[:, 0], known[:, 1], s=9, color="0.8", linewidths=0, label="known classes")
    for order, group in enumerate(np.unique(points.groups)):
        name = points.names[group] if group < len(points.names) else str(group)
        here = novel[points.groups == group]
        colour, marker = COLOURS[order % len(COLOURS)], _MARKERS[order // len(COLOURS) % len(_MARKERS)]
        axes.scatter(here[:, 0], here[:, 1], s=18, color=colour, marker=marker, linewidths=0, label=name)
    axes.set(title=title, xticks=[], yticks=[])
    axes.set_aspect("equal")
    axes.spines[:].set_color("0.8")
    if len(np.unique(points.groups)) <= _MAX_LEGEND_ENTRIES:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small", markerscale=1.5)
    save_figure(figure, target)


def draw_bars(columns: Mapping[str, Sequence[Bar]], *, title: str, target: Path) -> None:
    """Draw ACC of every row as a bar with its deviation over seeds, and the published figure as a mark."""
    rows = max(len(bars) for bars in columns.values())
    size = (7 * len(columns), 1.4 + 0.4 * rows)
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(1, len(columns), squeeze=False, sharey=True)
    for axes, (name, bars) in zip(places[0], columns.items(), strict=True):
        axes.barh(
            [bar.label for bar in bars],
            [bar.mean or 0.0 for bar in bars],
            xerr=[bar.deviation or 0.0 for bar in bars],
            color="C0",
            ecolor="0.3",
            capsize=3,
            label="here",
        )
        known = [(bar.published, bar.label) for bar in bars if bar.published is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "D", color="C1", label="published, see comparison.md")
        axes.set(xlabel=f"ACC in %, {name}", xlim=(0, 100))
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    places[0][0].invert_yaxis()  # the first row on top
    places[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.suptitle(title)
    save_figure(figure, target)


def cost_picture(points: Sequence[CostPoint]) -> bytes:
    """Return a PNG picture of ACC against time."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for point in points:
        axes.errorbar(point.minutes, point.acc, yerr=point.deviation, fmt="o", color="C0", ecolor="0.6", capsize=3)
        axes.annotate(
            point.label, (point.minutes, point.acc), xytext=(6, 3), textcoords="offset points", fontsize="small"
        )
    axes.set(xlabel="minutes of a run", ylabel="ACC in %")
    axes.set_xlim(left=0)
    axes.margins(x=0.15, y=0.1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return Picture(figure)._repr_png_()


def save_figure(figure: Figure, target: Path) -> None:
    """Write a PNG file atomically."""
    with atomic_path(target) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")


class Picture:
    """Figure that a notebook shows inline, with any matplotlib backend."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.figure.savefig(stream, format="png", dpi=100, bbox_inches="tight")
        return stream.getvalue()

    def save(self, path: str | Path) -> None:
        """Write a PNG file."""
        save_figure(self.figure, Path(path))


class Tick(NamedTuple):
    """Mark on an axis: its place and label."""

    place: float
    label: str


class Level(NamedTuple):
    """Horizontal line, e.g. a baseline."""

    name: str
    y: float
    value: float


class Dot(NamedTuple):
    """Point of a curve: its place, and the epoch and value that it stands for."""

    x: float
    y: float
    epoch: int
    value: float


@dataclass(frozen=True)
class DrawnCurve:
    """Curve in the coordinates of a chart."""

    name: str
    dots: list[Dot]  # finite values only
    last: float  # value of the last epoch
    colour: int
    dashed: bool

    @property
    def path(self) -> str:
        """Data of an SVG path."""
        return "M" + " ".join(f"{dot.x:.2f} {dot.y:.2f}" for dot in self.dots)

    @property
    def dotted(self) -> bool:
        """True if the points are marked with dots."""
        return len(self.dots) <= MAX_MARKED_POINTS


@dataclass(frozen=True)
class Chart:
    """Curves on common axes."""

    lines: list[DrawnCurve]
    levels: list[Level]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def chart(curves: Sequence[Curve], *, top: float | None = None, levels: Mapping[str, float] | None = None) -> Chart:
    """Return a chart of curves. Its x axis starts at epoch 0, its y axis ends at `top` or at the largest value."""
    epochs = max(epoch for curve in curves for epoch, _ in curve.points)
    values = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    low, high = min(0.0, *values, 0.0), top or max(*values, 0.0, 0.0) or 1.0
    marks = MaxNLocator(5 if top else 3, steps=[1, 2, 5, 10]).tick_values(low, high)
    if top is None:
        low, high = float(marks[0]), float(marks[-1])

    def height(value: float) -> float:
        return 100 * (high - value) / (high - low)

    lines = []
    for curve in curves:
        finite = [(epoch, value) for epoch, value in curve.points if math.isfinite(value)]
        dots = [Dot(100 * epoch / epochs, height(value), epoch, value) for epoch, value in finite]
        lines.append(DrawnCurve(curve.name, dots, curve.points[-1][1], curve.colour, curve.dashed))
    return Chart(
        lines,
        levels=[Level(name, height(value), value) for name, value in (levels or {}).items()],
        x_ticks=[Tick(100 * mark / epochs, f"{mark:.0f}") for mark in _whole_numbers(epochs)],
        y_ticks=[Tick(height(mark), f"{mark:g}") for mark in marks if low <= mark <= high],
    )


def _whole_numbers(most: int) -> list[float]:
    marks = MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]).tick_values(0, most)
    return [float(mark) for mark in marks if mark <= most]
