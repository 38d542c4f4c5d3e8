"""Process of a server: its ports, start and end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ncd_serve.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_SECONDS = 0.05
SHELL_SAFE = re.compile(r"[\w./+-]+", re.ASCII)
RUN_WITH_PARENT = Path(__file__).with_name("run_with_parent.py")


class Ports(NamedTuple):
    """Ports of one server."""

    http: int
    grpc: int
    metrics: int


USUAL_PORTS = Ports(http=8000, grpc=8001, metrics=8002)


def plain_temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory whose path needs no quotes: Triton passes it unquoted through a shell."""
    usual = tempfile.gettempdir()
    for parent in (usual, "/tmp", "/var/tmp"):
        if SHELL_SAFE.fullmatch(parent) and os.access(parent, os.W_OK):
            return tempfile.TemporaryDirectory(prefix="ncd-triton-", dir=parent)
    raise ServerError(
        f"Triton cannot work in the temporary folder {usual}: its path has spaces or special characters",
        hint="set TMPDIR to another folder",
    )


def choose_ports(host: str, *wanted: int | None) -> Ports:
    """Return the requested ports if they are free, and free ones for those that are None."""
    with ExitStack() as held:  # until the last is chosen, so that no two are the same
        return Ports(*[held.enter_context(_listen(host, port or 0)).getsockname()[1] for port in wanted])


def usual_or_free(host: str, wanted: int | None, usual: int) -> int | None:
    """Return the requested port, else the usual one unless it is taken; None (and 0) stand for any free port."""
    if wanted is not None:
        return wanted
    try:
        _listen(host, usual).close()
    except ServerError:
        return None
    return usual


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    try:
        # As Triton does: a port that only waits out its last connections counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ServerError(
            f"Triton cannot listen on {host}:{port}: {error.strerror}",
            hint="stop the program that uses the port, choose another port, or omit it to get a free one",
        ) from error
    return listener


def start_process(
    command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    """Start a server as the leader of a new process group; it logs to a file and ends with this process."""
    try:
        log = log_path.open("ab")
    except OSError as error:
        raise ServerError(f"cannot write the log {log_path}: {error.strerror}") from error
    with log:
        return subprocess.Popen(
            [sys.executable, "-IS", str(RUN_WITH_PARENT), str(os.getpid()), *command],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C in the terminal must reach this process only, which then stops the server in order.
            start_new_session=True,
        )


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process has ended, without reaping it: its id stays taken (see `end_process`)."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_process(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Send SIGTERM to a group's leader, wait for it, then kill the rest of the group."""
    try:
        os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while not has_exited(process) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        # The leader is not reaped yet, so the group's id cannot have passed on to strangers.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def remove_shared_memory(prefix: str) -> None:
    """Remove the shared memory regions that a killed server left behind."""
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
