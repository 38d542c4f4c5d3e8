"""Work on many files at once, in threads; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ncd_serve.progress import Track

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


def in_processes(function: Callable[[T], R], items: list[T], *, track: Track, what: str) -> list[R]:
    """`function` of each item, in order. Where torchrun has started several processes, each does a part for all."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return list(track(in_threads(function, items), what, len(items)))
    from ncd_training.base.distributed import join  # torch, which is slow to load

    ranks = join()
    part = ranks.share(items)
    return ranks.all_shares(list(track(in_threads(function, part), what, len(part))))
