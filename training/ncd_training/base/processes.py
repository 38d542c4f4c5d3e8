"""Processes and threads: how this process was launched, alone or by torchrun, and work in threads. Needs no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Launch:
    """Rank and size that torchrun sets in the environment. Only `ncd-serve train` reads them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_size: int = 1
    machine: int = 0
    job: str | None = None  # id of the torchrun job: the same for all processes, and after a restart

    @classmethod
    def read(cls) -> Launch:
        """Read the variables of torch's `env://`. If one is missing, this process trains alone."""
        found = os.environ
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= found.keys():
            return cls()
        job = found.get("TORCHELASTIC_RUN_ID")
        return cls(
            int(found["RANK"]),
            int(found["WORLD_SIZE"]),
            int(found.get("LOCAL_RANK", "0")),
            int(found.get("LOCAL_WORLD_SIZE", "1")),
            int(found.get("GROUP_RANK", found["RANK"])),
            # torchrun sets `none` if it was given no id; its process id identifies the job then.
            f"{platform.node()}, process {os.getppid()}" if job == "none" else job,
        )

    @property
    def is_leader(self) -> bool:
        """True for the one process that writes files and reports."""
        return self.rank == 0


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
