"""Curves as shapes in a square of 100 by 100, which a page stretches to the room it has; y points down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

Points = Sequence[tuple[int, float]]  # epochs and values
_MOST_DOTS = 30  # points of a line that one can still tell apart


class Tick(NamedTuple):
    """A mark on an axis: where, and what it says."""

    place: float
    label: str


class Level(NamedTuple):
    """A horizontal line, e.g. a baseline."""

    name: str
    y: float
    value: float


class Dot(NamedTuple):
    """A point of a line, and what it stands for."""

    x: float
    y: float
    epoch: int
    value: float


@dataclass(frozen=True)
class Line:
    """A figure over the epochs."""

    name: str
    dots: list[Dot]  # without values that are no numbers
    last: float
    colour: int
    dashed: bool

    @property
    def path(self) -> str:
        """For an SVG path."""
        return "M" + " ".join(f"{dot.x:.2f} {dot.y:.2f}" for dot in self.dots)

    @property
    def dotted(self) -> bool:
        """Whether its points are shown one by one."""
        return len(self.dots) <= _MOST_DOTS


@dataclass(frozen=True)
class Chart:
    """Lines on common axes."""

    lines: list[Line]
    levels: list[Level]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def chart(
    curves: Mapping[str, Points], *, top: float | None = None, levels: Mapping[str, float] | None = None
) -> Chart:
    """Lines from epoch 0 on and from 0 up, to `top` or to what there is.

    `global precision` and `global recall` share a colour; recall is dashed.
    """
    epochs = max(epoch for points in curves.values() for epoch, _ in points)
    values = [value for points in curves.values() for _, value in points if math.isfinite(value)]
    low, high = min(0.0, *values, 0.0), top or max(*values, 0.0, 0.0) or 1.0
    marks = MaxNLocator(5 if top else 3, steps=[1, 2, 5, 10]).tick_values(low, high)
    if top is None:
        low, high = float(marks[0]), float(marks[-1])

    def height(value: float) -> float:
        return 100 * (high - value) / (high - low)

    colours: dict[str, int] = {}
    lines = []
    for name, points in curves.items():
        branch, _, kind = name.rpartition(" ")
        finite = [(epoch, value) for epoch, value in points if math.isfinite(value)]
        dots = [Dot(100 * epoch / epochs, height(value), epoch, value) for epoch, value in finite]
        colour = colours.setdefault(branch or name, len(colours))
        lines.append(Line(name, dots, last=points[-1][1], colour=colour, dashed=kind == "recall"))
    return Chart(
        lines,
        levels=[Level(name, height(value), value) for name, value in (levels or {}).items()],
        x_ticks=[Tick(100 * mark / epochs, f"{mark:.0f}") for mark in _whole_numbers(epochs)],
        y_ticks=[Tick(height(mark), f"{mark:g}") for mark in marks if low <= mark <= high],
    )


def _whole_numbers(most: int) -> list[float]:
    marks = MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]).tick_values(0, most)
    return [float(mark) for mark in marks if mark <= most]
