"""Progress of training: a live table on a terminal, about ten plain lines elsewhere, every epoch in the log."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from rich.console import Console, ConsoleRenderable, Group, RenderHook
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from ncd_serve.errors import NcdError
from ncd_serve.progress import Advance, Progress
from ncd_serve.text import SafeConsole, printable
from ncd_training.summary.figures import BALANCE, QUALITY, EpochRow, grouped

T = TypeVar("T")
_PLAIN_LINES = 10  # of a run, where there is no terminal
_NAME_WIDTH, _CELL_WIDTH, _MAX_EPOCH_COLUMNS = 24, 9, 8


class EpochDisplay:
    """Display of a run while it trains."""

    def __init__(self, progress: Progress, log: RunLog, *, epochs: int, steps: int, rows: Sequence[EpochRow]) -> None:
        console = progress.console
        self._console, self._log, self._epochs, self._rows = console, log, epochs, list(rows)
        self._shown: AbstractContextManager[Advance | None] = nullcontext()
        if console.is_jupyter or progress.file:
            self._shown = progress.bar("training", epochs * steps, len(rows) * steps)
        self._move: Advance | None = None  # of the bar in a notebook or a file
        self._started, self._done_before = time.monotonic(), len(rows)
        # A step may take a minute: the speed is averaged over ten minutes, not rich's half minute.
        self._progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(30),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            speed_estimate_period=600,
        )
        self._task = self._progress.add_task("", total=epochs * steps, completed=len(rows) * steps)
        self._live = Live(get_renderable=self._draw, console=console, transient=True, refresh_per_second=2)

    def steps(self, batches: Iterable[T]) -> Iterable[T]:
        """Return the batches of the next epoch; the bar advances after each one."""
        return _Counted(batches, self._advance)

    def say(self, what: str) -> None:
        """Show the current activity, e.g. evaluation."""
        description = f"epoch {len(self._rows)}/{self._epochs}, {what}"
        self._progress.update(self._task, description=description)
        if self._move and not self._console.is_jupyter:  # a notebook's bar keeps the loss of the last step
            self._move(0, description)

    def show(self, row: EpochRow) -> None:
        """Add a finished epoch to the table, the plain lines or the log."""
        self._rows.append(row)
        line = f"epoch {row['epoch']}/{self._epochs}  {self._left()}  {_figures(row)}"
        every = max(1, self._epochs // _PLAIN_LINES)
        if not self._console.is_terminal and (row["epoch"] % every == 0 or row["epoch"] == self._epochs):
            self._console.print(line, soft_wrap=True, highlight=False)
        else:
            self._log.write(line)

    def __enter__(self) -> EpochDisplay:
        """Start drawing."""
        self.say("starting")
        if self._console.is_terminal:
            self._live.start()
        self._move = self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop drawing; the last table of a finished run stays on the screen."""
        self._live.stop()
        self._shown.__exit__(None, None, None)
        if kind is None and self._console.is_terminal and self._rows:
            self._console.print(figures_table(self._rows, width=self._console.width))

    def _advance(self, number: int) -> None:
        description = f"epoch {len(self._rows) + 1}/{self._epochs}, step {number}"
        self._progress.update(self._task, advance=1, description=description)
        if self._move:
            self._move(1, description)

    def _left(self) -> str:
        epoch = (time.monotonic() - self._started) / (len(self._rows) - self._done_before)
        return f"{duration(epoch * (self._epochs - len(self._rows)))} left"

    def _draw(self) -> Group:
        return Group(figures_table(self._rows, width=self._console.width), self._progress)


class _Counted(Iterable[T]):
    def __init__(self, batches: Iterable[T], advance: Callable[[int], None]) -> None:
        self._batches, self._advance = batches, advance

    def __iter__(self) -> Iterator[T]:
        for number, batch in enumerate(self._batches, start=1):
            yield batch
            self._advance(number)


def figures_table(rows: Sequence[EpochRow], *, width: int) -> Table:
    """Return a table with a line for each figure, and a column for each of the last evaluated epochs and the newest."""
    columns = max(1, min(_MAX_EPOCH_COLUMNS, (width - _NAME_WIDTH) // _CELL_WIDTH))
    chosen = [row for row in rows[:-1] if BALANCE in row][-(columns - 1) :] if columns > 1 else []
    chosen += rows[-1:]
    shown = [grouped(row) for row in chosen]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("epoch", width=_NAME_WIDTH - 4, no_wrap=True)
    for row in chosen:
        table.add_column(str(row["epoch"]), justify="right", width=_CELL_WIDTH - 2)
    for group in shown[0] if shown else ():
        names = list(dict.fromkeys(name for epoch in shown for name in epoch[group]))
        if names:
            table.add_row(f"[bold]{group}[/bold]" if group == QUALITY else f"[dim]{group}[/dim]")
        for name in names:
            table.add_row(f"  {name}", *(_cell(epoch[group].get(name)) for epoch in shown))
    return table


def duration(seconds: float) -> str:
    """Return a rounded duration: `40 s`, `12 min`, `3 h 20 min`, `2 days 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days {hours % 24} h"


def _figures(row: EpochRow) -> str:
    return "  ".join(f"{name} {value:.3f}" for group in grouped(row).values() for name, value in group.items())


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


class RunLog(RenderHook):
    """Log of a run: while open, it copies everything that the console prints to a file; without a path, to none."""

    def __init__(self, path: Path | None, console: Console) -> None:
        self._path, self._console = path, console

    def write(self, text: str) -> None:
        """Write to the file only, e.g. figures that a terminal shows in a live table."""
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as stream:
            for line in filter(None, (line.rstrip() for line in text.split("\n"))):
                stream.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {printable(line)}\n")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Log renderables that the console is about to print. Live displays pass only control codes."""
        words = [item for item in renderables if not isinstance(item, Control)]
        if words:
            # In a notebook, rich would show the lines there a second time and write nothing to the file.
            plain = SafeConsole(file=io.StringIO(), width=1000, color_system=None, force_jupyter=False)
            plain.print(*words)
            self.write(plain.file.getvalue())  # type: ignore[attr-defined]
        return renderables

    def __enter__(self) -> RunLog:
        """Start copying the console."""
        self._console.push_render_hook(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop copying; the last line is the error that ended the run, if any."""
        self._console.pop_render_hook()
        if kind is not None:
            self.write(f"ended by {kind.__name__}: {error}" if str(error) else f"ended by {kind.__name__}")
        if isinstance(error, NcdError) and error.hint:
            self.write(f"hint: {error.hint}")


@contextmanager
def tensorboard(folder: Path, *, epochs_done: int) -> Iterator[Callable[[EpochRow], None]]:
    """Yield a writer of epochs. Epochs after `epochs_done`, left by an interrupted run, are dropped."""
    from torch.utils.tensorboard import SummaryWriter  # an optional extra

    writer = SummaryWriter(folder, purge_step=epochs_done + 1)

    def write(row: EpochRow) -> None:
        for group, figures in grouped(row).items():
            for name, value in figures.items():
                writer.add_scalar(f"{group}/{name}", value, row["epoch"])
        writer.flush()

    try:
        yield write
    finally:
        writer.close()
