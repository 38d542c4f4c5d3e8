"""Progress of long work: a bar on a terminal or in a notebook, a file for the studio, a line a minute elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import TaskID
from rich.prompt import Confirm

T = TypeVar("T")
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]
Advance = Callable[[int, str], None]  # steps done since the last call, description
PROGRESS_VARIABLE = "NCD_SERVE_PROGRESS"  # a file for progress, in the environment of commands that the studio runs
_LINE_SECONDS = 60.0
_REDRAW_SECONDS = 0.2


class Progress:
    """Messages and progress of a command or a call, on one console."""

    def __init__(self, console: Console, *, file: Path | None = None) -> None:
        self.console = console
        self.file = file  # where another process reads how far this one is

    def say(self, text: str, *, style: str | None = None) -> None:
        """Print a line unchanged: no markup, no line breaks."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def confirm(self, question: str) -> bool:
        """Ask a question on a terminal where somebody can answer; elsewhere the answer is yes."""
        if self.console.quiet or not (self.console.is_terminal and sys.stdin is not None and sys.stdin.isatty()):
            return True
        return Confirm.ask(question, console=self.console, default=False)

    def status(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner while a single step runs; a notebook and a log get no spinner."""
        if self.file:
            return _FileBar(self.file, None, 0, text)
        shown = self.console.is_terminal and not self.console.quiet
        return self.console.status(text) if shown else nullcontext()

    def track(self, items: Iterable[T], description: str, total: int | None, done: int = 0) -> Iterator[T]:
        """Yield the items and count them; `done` were counted before."""
        with self.bar(description, total, done) as advance:
            for item in items:
                yield item
                advance(1, description)

    @contextmanager
    def bar(self, description: str, total: int | None, done: int = 0) -> Iterator[Advance]:
        """Yield a function that advances a bar by a number of steps and shows a description."""
        if self.console.quiet:
            yield lambda _steps, _description: None
        elif self.file:
            with _FileBar(self.file, total, done, description) as bar:
                yield bar.advance
        elif self.console.is_jupyter:
            yield _NotebookBar(description, total, done).advance
        elif self.console.is_terminal:
            with RichProgress(console=self.console, transient=True) as progress:
                yield _advance_rich(progress, progress.add_task(description, total=total, completed=done))
        else:
            yield _Lines(self, total, done).advance


SILENT = Progress(Console(quiet=True))


def silent(items: Iterable[T], _description: str, _total: int) -> Iterable[T]:
    """Return the items; shows no progress."""
    return items


def _advance_rich(progress: RichProgress, task: TaskID) -> Advance:
    return lambda steps, description: progress.update(task, advance=steps, description=description)


class _Lines:
    """A line a minute."""

    def __init__(self, progress: Progress, total: int | None, done: int) -> None:
        self._progress, self._total, self._done = progress, total, done
        self._start = self._said = time.monotonic()

    def advance(self, steps: int, description: str) -> None:
        self._done += steps
        now = time.monotonic()
        if now - self._said > _LINE_SECONDS:
            self._said = now
            share = f"{self._done / self._total:.0%}" if self._total else f"{self._done:,}"
            self._progress.say(f"{description}: {share} after {(now - self._start) / 60:.0f} min")


class _FileBar:
    """A file with the description, the steps done and their number; it is there while the work goes on."""

    def __init__(self, file: Path, total: int | None, done: int, description: str) -> None:
        self._file, self._total, self._done = file, total, done
        self._written = 0.0
        self._description = description

    def __enter__(self) -> _FileBar:
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)

    def advance(self, steps: int, description: str) -> None:
        self._done, self._description = self._done + steps, description
        if not steps or time.monotonic() - self._written > _REDRAW_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        temporary = self._file.with_name(f"{self._file.name}.part")
        with suppress(OSError):  # the work matters more
            temporary.write_text(json.dumps({"what": self._description, "done": self._done, "total": self._total}))
            temporary.replace(self._file)


class _NotebookBar:
    """A bar in a notebook's output cell, updated in place; needs no widgets."""

    def __init__(self, description: str, total: int | None, done: int) -> None:
        from IPython.display import HTML, display  # there is a notebook, so it is installed

        self._html, self._total, self._done = HTML, total, done
        self._handle = display(HTML(self._draw(description)), display_id=True)
        self._drawn = time.monotonic()

    def advance(self, steps: int, description: str) -> None:
        self._done += steps
        if time.monotonic() - self._drawn > _REDRAW_SECONDS or self._done == self._total:
            self._drawn = time.monotonic()
            self._handle.update(self._html(self._draw(description)))

    def _draw(self, description: str) -> str:
        limit = f' max="{self._total}"' if self._total else ""
        count = f"{self._done:,} of {self._total:,}" if self._total else f"{self._done:,}"
        return f'<progress value="{self._done}"{limit}></progress> {escape(description)}: {count}'
