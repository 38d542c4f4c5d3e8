"""Memory of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters in glibc's malloc.h
_WHILE_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}
# What glibc comes to by itself in a process that has freed large tensors.
_AFTERWARDS = {_MMAP_MAX: 65_536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep what tensors free for the next ones, until the end.

    Otherwise glibc returns each large tensor's memory to the system, which clears it anew, page by page: a third of the
    time of a step on cached maps.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):  # another C library
        yield
        return
    for parameter, value in _WHILE_KEPT.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _AFTERWARDS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)
