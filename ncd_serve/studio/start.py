"""Start of a studio: a free port of this machine, a token, the page in a browser, and an orderly end."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

import uvicorn

from ncd_serve.bundle import MANIFEST
from ncd_serve.contract import checked_token
from ncd_serve.errors import DataError, ServerError
from ncd_serve.places import find_runs, started
from ncd_serve.reference import REFERENCE
from ncd_serve.studio.app import make_app
from ncd_serve.studio.desk import Desk, newest_of
from ncd_serve.studio.project import Project
from ncd_serve.triton.registry import holder_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ncd_serve.progress import Progress

USUAL_PORT = 8020
_OPEN_SECONDS = 0.3


def run_studio(
    source: Path | None,
    *,
    images: Path | None,
    host: str,
    port: int | None,
    token: str | None,
    browser: bool,
    ready: Callable[[str], None],
    progress: Progress,
) -> None:
    """Serve the page until interrupted; `ready` gets its address."""
    chosen = checked_token(token) or secrets.token_urlsafe(18)
    with _listener(host, port) as listener:
        bound = int(listener.getsockname()[1])
        address = f"http://{host}:{bound}"
        desk = open_desk(source, images=images, address=address, token=chosen, progress=progress)
        names = {host, "127.0.0.1", "localhost"} if host in ("127.0.0.1", "localhost") else {host}
        hosts = frozenset(f"{name}:{bound}" for name in names)
        app = make_app(desk, token=chosen, hosts=hosts, cookie=f"ncd-studio-{bound}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
        page = f"{address}/?token={chosen}"
        listener.listen()  # a browser that is quicker than the server waits instead of being refused
        ready(page)
        if browser:
            Timer(_OPEN_SECONDS, webbrowser.open, [page]).start()
        try:
            server.run(sockets=[listener])
        finally:
            desk.close()


def open_desk(source: Path | None, *, address: str, token: str, progress: Progress, images: Path | None = None) -> Desk:
    """Return a studio with a run, a bundle, or a folder of images open; without a source with the newest run.

    `images` is the present folder of the images.
    """
    desk = Desk(address, token, progress)
    if source is None:
        source = find_newest(desk)
        if source is None:
            return desk
    if not source.is_dir():
        raise DataError(f"no such folder: {source}", hint="give a run, a bundle or a folder of images")
    source = newest_of(source, progress)
    if (source / MANIFEST).is_file() or (source / REFERENCE).is_file():
        desk.opened = Project(source, images=images, progress=progress)
    elif (source / "config.toml").is_file():
        desk.offer_to_resume(source)
    else:
        desk.folder = source.resolve()
    return desk


def find_newest(desk: Desk) -> Path | None:
    """Return the newest finished run, if there is one; one that was started later and interrupted can be resumed."""
    interrupted, finished = find_runs(finished=False), find_runs()
    if interrupted and (not finished or started(interrupted[0]) > started(finished[0])):
        desk.offer_to_resume(interrupted[0])
    if finished:
        desk.progress.say(f"the newest run: {finished[0]}")
        return finished[0]
    return None


def _listener(host: str, port: int | None) -> socket.socket:
    """Return a socket on the port, or without one on the usual port or any free one."""
    for wanted in (port,) if port is not None else (USUAL_PORT, 0):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, wanted))
            return listener
        except OSError as error:
            listener.close()
            reason = error.strerror
    raise ServerError(
        f"cannot listen on {host}:{port} ({reason}, {holder_of(port or 0)})", hint="choose another --port"
    )
