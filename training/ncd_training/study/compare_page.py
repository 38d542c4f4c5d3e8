"""Page of a comparison, comparison.html: one file that needs no network and no script."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime
from statistics import fmean
from typing import NamedTuple

from ncd_serve.files import write_text
from ncd_training.objective.method import method_named
from ncd_training.study.compare import Job
from ncd_training.study.compare_table import Comparison
from ncd_training.study.significance import Interval
from ncd_training.summary.figures import Curve
from ncd_training.summary.page import Setting, changed_settings, template
from ncd_training.summary.plots import Chart, CostPoint, chart, cost_picture

PAGE = "comparison.html"
_COLOURS = 6  # of the page's style; further rows are dashed


class RowSettings(NamedTuple):
    """Settings of a row that differ from the defaults."""

    label: str
    method: str
    settings: list[Setting]


def write_page(found: Comparison, jobs: Sequence[Job], *, command: str) -> None:
    """Write the page of a comparison; `command` makes it again."""
    environments = [job.run.environment for job in jobs if job.run.environment.exists()]
    header, *rows = found.cells()
    picture = cost_picture(_costs(found)) if _costs(found) else None
    page = template("comparison.html.jinja").render(
        title=found.title,
        header=header,
        rows=rows,
        notes=[*found.errors, *found.notes],
        intervals=intervals(found),
        pairs=pairs(found),
        labels=found.resampled.labels if found.resampled else [],
        curves=accuracy_curves(found, jobs),
        costs=None if picture is None else "data:image/png;base64," + b64encode(picture).decode(),
        settings=row_settings(jobs),
        seeds=sorted({job.config.optim.seed for job in jobs}),
        facts=json.loads(environments[0].read_text()) if environments else {},
        command=command,
        written=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )
    write_text(found.folder / PAGE, page)


def intervals(found: Comparison) -> dict[str, Interval]:
    """Return the ACC of each row with its interval, the best row first."""
    if found.resampled is None:
        return {}
    scores = {label: found.resampled.score(label) for label in found.resampled.labels}
    return dict(sorted(scores.items(), key=lambda item: -item[1].mean))


def pairs(found: Comparison) -> dict[str, list[Interval | None]]:
    """Return by how much each row is better than every other one; None for itself."""
    tests = found.resampled
    if tests is None:
        return {}
    return {
        label: [None if label == other else tests.difference(label, other) for other in tests.labels]
        for label in tests.labels
    }


def accuracy_curves(found: Comparison, jobs: Sequence[Job]) -> Chart | None:
    """Return ACC over the epochs, mean over seeds; rows without epochs are levels."""
    curves, levels = [], {}
    for number, line in enumerate(found.lines):
        by_epoch: dict[int, list[float]] = {}
        for job in jobs:
            for row in job.run.read_metrics() if job.row.label == line.label and job.finished else ():
                if "acc" in row:
                    by_epoch.setdefault(row["epoch"], []).append(row["acc"])
        points = [(epoch, fmean(values)) for epoch, values in sorted(by_epoch.items())]
        if points:
            curves.append(Curve(line.label, points, number % _COLOURS, dashed=number >= _COLOURS))
        elif found.columns and line.acc.get(found.columns[0]):
            levels[line.label] = fmean(line.acc[found.columns[0]]) / 100
    return chart(curves, top=1.0, levels=levels) if curves else None


def row_settings(jobs: Sequence[Job]) -> list[RowSettings]:
    """Return the settings of each row, with those of its first seed."""
    first = {job.row.label: job for job in reversed(jobs)}
    return [
        RowSettings(label, method_named(job.config.method.name).title, changed_settings(job.config))
        for label, job in reversed(first.items())
    ]


def _costs(found: Comparison) -> list[CostPoint]:
    """Return time and ACC of the rows that have both."""
    points = []
    for line in found.lines:
        mean, deviation = line.measured(found.columns[0]) if found.columns else (None, None)
        if mean is not None and line.seconds:
            points.append(CostPoint(line.label, line.seconds / 60, mean, deviation))
    return points
