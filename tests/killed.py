"""A command that is killed at a certain moment, whatever the speed of the machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

# Python reports such calls to its audit hooks before they are made.
_KILLED = """
import os, signal, sys
event, name = sys.argv[1:3]
def end(what, arguments):
    if what == event and any(name in str(each) for each in arguments):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(end)
sys.argv = ["ncd-serve", *sys.argv[3:]]
from ncd_serve.__main__ import main
main()
"""


def kill_at(event: str, name: str, *arguments: object, cwd: Path) -> None:
    """Run a command that gets SIGKILL when it is about to make or rename a path with this name."""
    command = [sys.executable, "-c", _KILLED, event, name, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
