"""Progress for anything that takes more than two seconds: a bar on a terminal, silence elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track as rich_track

T = TypeVar("T")
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


def on(console: Console) -> Track:
    """A `track(items, description, total)` that draws on a console."""

    def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
        yield from rich_track(
            items, description, total, console=console, transient=True, disable=not console.is_terminal
        )

    return track


def silent(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    """No progress at all."""
    return items
