"""Table of a comparison with the paper's figures, for the terminal, Markdown, CSV and the plot."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from ncd_serve.files import write_text
from ncd_serve.text import spreadsheet_cell
from ncd_training.data.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN
from ncd_training.score.metrics import ONE_MATCHING, PAPER
from ncd_training.study.compare import Job, Ledger
from ncd_training.study.significance import Interval, Resampled
from ncd_training.summary.live import duration
from ncd_training.summary.plots import Bar, draw_bars

_OPEN = [f"{UNLABELLED_TRAIN}, {part}{how}" for how in (PAPER, ONE_MATCHING) for part in ("seen", "novel", "all")]
_NONE = "-"
Measured = tuple[float | None, float | None]  # mean and deviation; None where there is none


@dataclass(frozen=True)
class ResultRow:
    """Results of a row over its finished seeds. ACC in percent by column."""

    label: str
    method: str
    seeds: int
    acc: dict[str, list[float]]
    published: dict[str, tuple[float, float | None]]
    seconds: float  # mean over runs
    cpu_seconds: float
    memory: int  # largest peak in bytes
    error: str | None

    def measured(self, column: str) -> Measured:
        """Return mean and deviation of ACC here."""
        return mean_and_deviation(self.acc.get(column, []))

    def figure(self, column: str) -> Measured:
        """Return ACC and deviation in the paper."""
        return self.published.get(column, (None, None))


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: rows of the table, and notes on them."""

    title: str
    lines: list[ResultRow]
    notes: list[str]
    folder: Path
    exit_code: int = 0  # of the first run that failed
    resampled: Resampled | None = None  # of the rows that are finished with all seeds, if there are two

    @property
    def columns(self) -> list[str]:
        """Names of the ACC columns. In an open world, the column of all images with one matching is the plain one."""
        measured = {name for line in self.lines for name in line.acc}
        opened = [name for name in _OPEN if name in measured]
        return [name for name in (*(opened or [UNLABELLED_TRAIN]), NOVEL_TEST, KNOWN_TEST) if name in measured]

    @property
    def published(self) -> list[str]:
        """Columns with figures in the paper."""
        return [name for name in self.columns if any(name in line.published for line in self.lines)]

    def cells(self) -> list[list[str]]:
        """Return the table as text, header first; a column of the paper's figures follows the measured one."""
        header = ["row"]
        for name in self.columns:
            header += [name.removeprefix(f"{UNLABELLED_TRAIN}, "), *(["paper"] if name in self.published else [])]
        if self.resampled:
            header.append(f"against {self.resampled.best}")
        return [[*header, "seeds", "time", "CPU time", "memory"], *(self._cells(line) for line in self.lines)]

    def _cells(self, line: ResultRow) -> list[str]:
        cells = [line.label]
        for name in self.columns:
            cells.append(with_deviation(*line.measured(name)))
            if name in self.published:
                cells.append(with_deviation(*line.figure(name)))
        if self.resampled:
            gap = self.against_best(line.label)
            cells.append(_NONE if gap is None else gap_text(gap))
        if not line.seconds:
            return [*cells, str(line.seeds), _NONE, _NONE, _NONE]
        times = duration(line.seconds), duration(line.cpu_seconds)
        return [*cells, str(line.seeds), *times, f"{line.memory / 1e9:.1f} GB"]

    def against_best(self, label: str) -> Interval | None:
        """Return by how much a row is better than the best one; None for that row, and for rows that lack a seed."""
        if self.resampled is None or label not in self.resampled.labels or label == self.resampled.best:
            return None
        return self.resampled.difference(label, self.resampled.best)

    @property
    def errors(self) -> list[str]:
        """Error messages of failed rows."""
        return [f"{line.label} failed: {line.error}" for line in self.lines if line.error]

    def table(self, width: int) -> Table:
        """Return the table for a terminal of `width` columns; transposed, and without a frame, if it is too wide."""
        cells = self.cells()
        if _width(cells) > width:
            cells = min(cells, [list(column) for column in zip(*cells, strict=True)], key=_width)
        header, *rows = cells
        table = Table(header[0], title=self.title, title_justify="left")
        if _width(cells) > width:
            table.box, table.padding = box.SIMPLE_HEAD, 0
        for name in header[1:]:
            # Names of splits may break after a hyphen.
            table.add_column(name.replace("-", "-\n"), justify="right", style="dim" if name == "paper" else None)
        for row in rows:
            table.add_row(*row, style="dim" if row[0] == "paper" else None)
        return table

    def write(self, folder: Path) -> None:
        """Write comparison.md and comparison.csv."""
        header, *rows = self.cells()
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        notes = "\n".join(f"- {note}" for note in [*self.errors, *self.notes])
        write_text(folder / "comparison.md", f"# {self.title}\n\n{table}\n\n{notes}\n")
        write_text(folder / "comparison.csv", self._csv())

    def draw(self, folder: Path) -> None:
        """Draw comparison.png: the columns with figures in the paper, or the first column."""
        bars = {
            name: [Bar(line.label, *line.measured(name), line.figure(name)[0]) for line in self.lines]
            for name in self.published or self.columns[:1]
        }
        if bars:
            draw_bars(bars, title=self.title, target=folder / "comparison.png")

    def _csv(self) -> str:
        stream = io.StringIO()
        writer = csv.writer(stream)
        kinds = ("mean", "deviation", "published", "published deviation")
        header = [f"{name}, {kind}" for name in self.columns for kind in kinds]
        gaps = ["against best", "against best, low", "against best, high"]
        header += [*gaps, "seconds", "cpu_seconds", "memory_bytes", "error"]
        writer.writerow(["row", "method", "seeds", *header])
        for line in self.lines:
            figures = [figure for name in self.columns for figure in (*line.measured(name), *line.figure(name))]
            figures += self.against_best(line.label) or [None] * len(gaps)
            rounded = ["" if figure is None else f"{figure:.2f}" for figure in figures]
            costs = [f"{line.seconds:.1f}", f"{line.cpu_seconds:.1f}", line.memory, spreadsheet_cell(line.error or "")]
            writer.writerow([spreadsheet_cell(line.label), line.method, line.seeds, *rounded, *costs])
        return stream.getvalue()


def _width(cells: Sequence[Sequence[str]]) -> int:
    """Return the width of a table in a terminal; headers may break between words, other cells may not."""
    header, *rows = cells
    words = [max(map(len, name.replace("-", "- ").split())) for name in header]
    return 1 + sum(
        3 + max(column) for column in zip(words, *([len(cell) for cell in row] for row in rows), strict=True)
    )


def gap_text(gap: Interval) -> str:
    """Return `-3.2 (-5.0 to -1.4) *`; the star marks a real difference."""
    return f"{gap.mean:+.1f} ({gap.low:+.1f} to {gap.high:+.1f}){' *' * gap.real}"


def collect(
    jobs: Sequence[Job], ledger: Ledger, folder: Path, *, title: str, dataset: str | None, notes: Sequence[str]
) -> Comparison:
    """Return the table of all finished runs so far."""
    by_row: dict[str, list[Job]] = {}
    for job in jobs:
        by_row.setdefault(job.row.label, []).append(job)
    lines = [_result_row(mine, ledger, dataset) for mine in by_row.values()]
    cached = ", ".join(job.name for job in jobs if ledger[job].cached)
    if cached:
        notes = [*notes, f"The time of {cached} includes filling the cache of views, which all rows share."]
    failed = [max(1, ledger[job].exit_code) for job in jobs if ledger[job].error]
    return Comparison(title, lines, list(notes), folder, failed[0] if failed else 0)


def _result_row(jobs: Sequence[Job], ledger: Ledger, dataset: str | None) -> ResultRow:
    row, done = jobs[0].row, [job for job in jobs if job.finished]
    acc: dict[str, list[float]] = {}
    for job in done:
        for name, score in job.run.read_summary().scores.items():
            acc.setdefault(name, []).append(100 * score.acc)
    opened = any(name in acc for name in _OPEN)
    costs = [ledger[job] for job in done]
    return ResultRow(
        label=row.label,
        method=row.method,
        seeds=len(done),
        acc=acc,
        published={
            f"{UNLABELLED_TRAIN}, {part}{PAPER}" if opened else UNLABELLED_TRAIN: figure
            for part, figure in row.figures(dataset).items()
        },
        seconds=statistics.fmean(cost.seconds for cost in costs) if costs else 0.0,
        cpu_seconds=statistics.fmean(cost.cpu_seconds for cost in costs) if costs else 0.0,
        memory=max((cost.memory for cost in costs), default=0),
        error=next((ledger[job].error for job in jobs if job not in done and ledger[job].error), None),
    )


def mean_and_deviation(values: Sequence[float]) -> Measured:
    """Return the mean, and the sample standard deviation of two or more values."""
    return (
        statistics.fmean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
    )


def with_deviation(mean: float | None, deviation: float | None) -> str:
    """Return `47.8±2.4`, or `47.8` without a deviation."""
    if mean is None:
        return _NONE
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f}±{deviation:.1f}"
