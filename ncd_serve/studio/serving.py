"""The Triton server of a project, as the page shows it: started, asked and stopped."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from ncd_serve.contract import TOKEN_VARIABLE
from ncd_serve.errors import NcdError
from ncd_serve.studio.commands import run_command
from ncd_serve.triton.install import find_triton
from ncd_serve.triton.probe import Probe
from ncd_serve.triton.registry import RunningServer, server_of
from ncd_serve.triton.serve import request_lines

if TYPE_CHECKING:
    from ncd_serve.places import ExportPlace

_START_SECONDS, _STOP_SECONDS = 180.0, 40.0


def serving_state(place: ExportPlace, *, exported: bool) -> dict[str, Any]:
    """Return whether a server runs, which versions it serves, its requests, and how to ask it.

    `exported`: the model is in the repository already.
    """
    server = server_of(place.repository) if exported else None
    facts: dict[str, Any] = {"repository": str(place.repository), "model": place.model, "running": server is not None}
    if server is None:
        return facts | {"exported": exported, "obstacle": _obstacle()}
    asked = bool(os.environ.get(TOKEN_VARIABLE))
    lines = request_lines(server.grpc_url, server.http_url, place.repository, name=place.model, token=asked)
    return facts | {
        "pid": server.pid,
        "url": server.grpc_url,
        "versions": _versions(server, place.model),
        "activity": _activity(server, place.model),
        "lines": lines,
    }


def start_serving(place: ExportPlace) -> None:
    """Start a server in the background, which outlives the studio."""
    run_command("serve", "--repository", str(place.repository), "--detach", "--quiet", seconds=_START_SECONDS)


def stop_serving(place: ExportPlace) -> None:
    """Stop the server of this repository, and no other."""
    if server := server_of(place.repository):
        server.stop(timeout=_STOP_SECONDS)


def _obstacle() -> str | None:
    """Return why no Triton can be started here, or None if one can."""
    try:
        find_triton()
    except NcdError as error:
        return str(error)
    return None


def _versions(server: RunningServer, model: str) -> list[str]:
    try:
        entries = Probe(server.http_url, headers=server.headers).versions()
    except (OSError, ValueError):  # it is just starting or ending
        return []
    return [entry.version for entry in entries if entry.name == model and entry.state == "READY"]


def _activity(server: RunningServer, model: str) -> dict[str, float] | None:
    found = server.activity.get(model)
    return {key: value for key, value in found._asdict().items() if not math.isnan(value)} if found else None
