"""Threads for work on many files; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_QUEUED_ITEMS = 1024  # millions of queued items would take gigabytes, and Ctrl-C would wait for all of them


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield `function` of each item, in order. Threads suffice: reading, decoding and encoding release the GIL."""
    pool = ThreadPoolExecutor()
    try:
        for start in range(0, len(items), _QUEUED_ITEMS):
            yield from pool.map(function, items[start : start + _QUEUED_ITEMS])
    finally:
        pool.shutdown(cancel_futures=True)
