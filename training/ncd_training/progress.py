"""Progress for anything that takes more than two seconds: a bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track as rich_track

T = TypeVar("T")
_QUIET_SECONDS = 60
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


def on(console: Console) -> Track:
    """A `track(items, description, total)` that draws on a console."""

    def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
        if console.is_terminal:
            yield from rich_track(items, description, total, console=console, transient=True)
        else:
            yield from _in_lines(items, description, total, console)

    return track


def _in_lines(items: Iterable[T], description: str, total: int, console: Console) -> Iterator[T]:
    start = said = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - said > _QUIET_SECONDS:
            said = time.monotonic()
            minutes = (said - start) / 60
            console.print(f"{description}: {number / total:.0%} after {minutes:.0f} min", highlight=False)
        yield item


def silent(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    """No progress at all."""
    return items
