"""Registry of the servers on this machine: one small file for each, in a private folder of the user."""

from __future__ import annotations

import os
import re
import select
import signal
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ncd_serve.errors import ServerError, UsageError
from ncd_serve.files import write_text
from ncd_serve.text import printable
from ncd_serve.triton.probe import Activity, Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ncd_serve.triton.server import TritonServer


class RunningServer(BaseModel):
    """A server, and the process that watches over it."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # there is no latency without requests

    pid: int
    born: int  # when the process started, in the kernel's clock: another process may get its id later
    since: float
    repository: Path
    grpc_url: str
    http_url: str
    metrics_url: str
    log: Path | None
    headers: dict[str, str]  # what requests have to carry where interfaces are restricted
    activity: dict[str, Activity] = {}  # of each model, by requests of clients

    def is_alive(self) -> bool:
        """Return True if the process still runs and is still the same."""
        return birth_of(self.pid) == self.born

    def trouble(self) -> str | None:
        """Return the reason why the server does not answer, or None if it does."""
        return Probe(self.http_url, headers=self.headers).unanswered()

    def stop(self, *, timeout: float) -> None:
        """Stop the server after its requests; raise ServerError if it does not end within `timeout` seconds."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Checked after the handle was taken, which stays with the process that has the id now.
            if not self.is_alive():
                return
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            ended, _, _ = select.select([handle], [], [], timeout)
        finally:
            os.close(handle)
        if not ended:
            raise ServerError(
                f"the server with id {self.pid} has not ended in {timeout:g} s",
                hint=f"kill -KILL {self.pid} ends it and drops its requests",
            )


@contextmanager
def registered(server: TritonServer, *, repository: Path, log: Path | None) -> Iterator[Callable[[], None]]:
    """Make a server that this process watches over known to `running_servers`, until the block ends.

    Yields a function that brings the record up to date; it writes only what has changed.
    """
    path = _folder() / f"{os.getpid()}.json"
    record = RunningServer(
        pid=os.getpid(),
        born=birth_of(os.getpid()) or 0,
        since=time.time(),
        repository=repository.resolve(),
        grpc_url=server.grpc_url,
        http_url=server.http_url,
        metrics_url=server.metrics_url,
        log=log,
        headers=server.headers,
    )
    written = ""

    def note() -> None:
        nonlocal written
        record.activity = server.activity()
        if (text := record.model_dump_json(indent=2) + "\n") != written:
            write_text(path, text)
            written = text

    note()
    try:
        yield note
    finally:
        path.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """List the running servers, oldest first; files of killed processes are removed."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            server = RunningServer.model_validate_json(path.read_bytes())
        except (ValidationError, FileNotFoundError):  # of another version of ncd-serve, or just removed
            continue
        if server.is_alive():
            found.append(server)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda server: server.since)


def choose_servers(ids: Sequence[int] = (), *, everything: bool = False) -> list[RunningServer]:
    """Return the running servers with these ids; without ids the only one, or with `everything` all of them."""
    servers = {server.pid: server for server in running_servers()}
    if not servers:
        raise ServerError("no server runs on this machine", hint="ncd-serve status lists running servers")
    if not ids and not everything and len(servers) > 1:
        raise UsageError("several servers run", hint=f"name one of {', '.join(map(str, servers))}, or use --all")
    if unknown := set(ids) - set(servers):
        raise UsageError(f"no server has the id {min(unknown)}", hint="ncd-serve status lists running servers")
    return [servers[pid] for pid in ids or servers]


def server_of(repository: Path) -> RunningServer | None:
    """Return the newest running server of a repository."""
    return next((server for server in reversed(running_servers()) if server.repository == repository.resolve()), None)


def holder_of(port: int) -> str:
    """Return who listens on a port of this machine, in words."""
    for server in running_servers():
        if any(re.search(rf":{port}\b", url) for url in (server.grpc_url, server.http_url, server.metrics_url)):
            return f"server {server.pid} of {server.repository}"
    sockets = {f"socket:[{number}]" for number in _listening(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or ended meanwhile
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                return f"process {process.name} ({printable((process / 'comm').read_text().strip())})"
    return "another program"


def _listening(port: int) -> Iterator[str]:
    """Yield the kernel's numbers of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
                    yield fields[9]


def default_log() -> Path:
    """Return the default log file of a detached server."""
    return _folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def birth_of(pid: int) -> int | None:
    """Return the start time of a process in the kernel's clock; None if it has ended."""
    try:
        # The name, in brackets, may hold anything; the state is the first field behind it.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(fields[18])


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usable = runtime is not None and os.access(runtime, os.W_OK)
    folder = (
        Path(runtime, "ncd-serve") if usable and runtime else Path(tempfile.gettempdir(), f"ncd-serve-{os.getuid()}")
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.stat(follow_symlinks=False)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ServerError(f"{folder} may be used by others", hint=f"chmod 700 {folder}, or remove it")
    return folder
