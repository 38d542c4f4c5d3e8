"""Charts of curves in a square of 100 by 100, which the report page stretches to its layout; y points down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

from ncd_training.summary.figures import MAX_MARKED_POINTS, Curve


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
