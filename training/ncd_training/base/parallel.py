"""Work on many files at once, in threads; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_BLOCK = 1024  # millions of waiting jobs would take gigabytes, and Ctrl-C would wait for all of them


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """`function` of each item, in order. Threads suffice: reading, decoding and encoding let others run."""
    pool = ThreadPoolExecutor()
    try:
        for start in range(0, len(items), _BLOCK):
            yield from pool.map(function, items[start : start + _BLOCK])
    finally:
        pool.shutdown(cancel_futures=True)
