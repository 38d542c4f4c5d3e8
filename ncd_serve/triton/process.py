"""Processes of a server, Triton and the gate before it: ports, start and end."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ncd_serve.errors import ServerError
from ncd_serve.triton import gate
from ncd_serve.triton.registry import holder_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_SECONDS = 0.05
GATE_SECONDS = 2.0  # it has nothing to finish once Triton has ended
# Triton passes it unquoted through a shell, and the path of a socket has at most 107 characters.
PLAIN_FOLDER = re.compile(r"[\w./+-]{1,70}", re.ASCII)
RUN_WITH_PARENT = Path(__file__).with_name("run_with_parent.py")


class Secrets(NamedTuple):
    """Secrets of one server: the token of its clients, and headers each of which opens the administration."""

    token: str
    keys: dict[str, str]


class Ports(NamedTuple):
    """Ports of one server."""

    http: int
    grpc: int
    metrics: int


USUAL_PORTS = Ports(http=8000, grpc=8001, metrics=8002)


def plain_temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory, readable by this user only, whose path is short and needs no quotes."""
    usual = tempfile.gettempdir()
    for parent in (usual, "/tmp", "/var/tmp"):
        if PLAIN_FOLDER.fullmatch(parent) and os.access(parent, os.W_OK):
            return tempfile.TemporaryDirectory(prefix="ncd-triton-", dir=parent)
    raise ServerError(
        f"Triton cannot work in the temporary folder {usual}: its path is long, or has spaces or special characters",
        hint="set TMPDIR to another folder",
    )


class GateProcess:
    """Process of the gate (see `gate`) before the HTTP and the metrics port of a Triton.

    Its Triton listens on the sockets `http` and `metrics`, in a folder of this user alone. It may be started again and
    again; clients keep their connections to the gate, and their requests wait.
    """

    def __init__(
        self,
        hosts: tuple[str, str],
        ports: tuple[int | None, int | None],
        *,
        preferred: tuple[int, int] = (0, 0),
        secrets: Secrets,
        log_path: Path | None,
    ) -> None:
        with ExitStack() as undo:
            self.folder = Path(undo.enter_context(plain_temporary_directory()))
            self.http, self.metrics = (f"unix:{self.folder / name}" for name in ("http", "metrics"))
            with ExitStack() as handed_over:
                doors = [
                    handed_over.enter_context(listen_on(*place)) for place in zip(hosts, ports, preferred, strict=True)
                ]
                self.ports: list[int] = [door.getsockname()[1] for door in doors]
                self._process = _start_gate(doors, (self.http, self.metrics), secrets, log_path or Path(os.devnull))
            undo.callback(end_process, self._process, GATE_SECONDS)
            self._undo = undo.pop_all()

    def is_running(self) -> bool:
        """Return whether the process still runs."""
        return not has_exited(self._process)

    def clear(self) -> None:
        """Remove the sockets of a Triton that has ended, so that the next one can listen on them."""
        for name in ("http", "metrics"):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """End the process."""
        self._undo.close()


def _start_gate(
    doors: Sequence[socket.socket], backends: Sequence[str], secrets: Secrets, log_path: Path
) -> subprocess.Popen[bytes]:
    numbers = [door.fileno() for door in doors]
    pairs = [f"fd:{number}={backend}" for number, backend in zip(numbers, backends, strict=True)]
    # Not on the command line, which everybody on the machine can read.
    environment = {**os.environ, gate.TOKEN_VARIABLE: secrets.token, gate.KEYS_VARIABLE: json.dumps(secrets.keys)}
    return start_process(
        [sys.executable, "-IS", gate.__file__, *pairs],
        cwd=Path("/"),
        environment=environment,
        log_path=log_path,
        keep=numbers,
    )


def choose_port(host: str, wanted: int | None, preferred: int = 0) -> int:
    """Return the port that `listen_on` gets."""
    with listen_on(host, wanted, preferred) as listener:
        return int(listener.getsockname()[1])


def listen_on(host: str, wanted: int | None, preferred: int) -> socket.socket:
    """Return a socket on the requested port, for None on the preferred one if that is free; 0 is any free port."""
    if wanted is None:
        with suppress(ServerError):
            return listen(host, preferred)
    return listen(host, wanted or 0)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise ServerError with the reason if it cannot."""
    listener = socket.socket()
    try:
        # As Triton does: a port that only waits out its last connections counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise ServerError(
            f"Triton cannot listen on {host}:{port}: {error.strerror}{f' (by {holder_of(port)})' if taken else ''}",
            hint="stop the program that uses the port, choose another port, or omit it to get a free one"
            if taken
            else "choose another address or port",
        ) from error
    return listener


def start_process(
    command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], log_path: Path, keep: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a server as the leader of a new process group; it logs to a file and ends with this process.

    Of open files, it inherits those of the numbers `keep`.
    """
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
            pass_fds=keep,
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


def protect_shared_memory(prefix: str) -> None:
    """Let nobody else read the regions through which Triton passes images; it makes them readable to all."""
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        with suppress(FileNotFoundError):
            region.chmod(0o600)


def remove_shared_memory(prefix: str) -> None:
    """Remove the shared memory regions that a killed server left behind."""
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
