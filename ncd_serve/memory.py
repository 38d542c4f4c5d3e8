"""Peak memory of processes.

Linux passes the maximum that getrusage and wait4 report on to a child process: a small program started by a large one
looks as large as that one. The peak in /proc is the process's own.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_PROCESSES = Path("/proc")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def peak_memory(pid: int | None = None) -> int:
    """Return the peak memory of a process so far, in bytes; None is this process.

    0 for another process that has ended, or on systems without /proc.
    """
    try:
        status = (_PROCESSES / str(pid or "self") / "status").read_text()
    except OSError:
        status = ""
    if told := _PEAK.search(status):
        return 1024 * int(told[1])
    return 0 if pid else rusage_memory(resource.getrusage(resource.RUSAGE_SELF))


def rusage_memory(usage: resource.struct_rusage) -> int:
    """Return the peak memory of a `struct_rusage` in bytes, for systems without /proc."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
