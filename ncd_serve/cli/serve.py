"""`serve`, `status` and `stop`: Triton servers on a model repository."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from ncd_serve.cli.console import answer, messages, out, say
from ncd_serve.cli.options import PublicKey, PythonModels, Token
from ncd_serve.contract import checked_token
from ncd_serve.errors import ServerError
from ncd_serve.places import DEFAULT_REPOSITORY
from ncd_serve.progress import Progress

if TYPE_CHECKING:
    from ncd_serve.triton.registry import RunningServer

_STOP_SECONDS = 40  # more than the drain of a server takes at most
_USUAL_PORT = "default {}, or a free one if that is taken; 0 for a free one"


def serve(
    repository: Annotated[
        Path | None,
        typer.Option(
            help="Triton model repository; default: the one that the newest run was exported to, else model_repository."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need 0.0.0.0.")] = "127.0.0.1",
    grpc_port: Annotated[int | None, typer.Option(help=f"Port for gRPC; {_USUAL_PORT.format(8001)}.")] = None,
    http_port: Annotated[int | None, typer.Option(help=f"Port for HTTP; {_USUAL_PORT.format(8000)}.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help=f"Port for metrics; {_USUAL_PORT.format(8002)}.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch/--no-watch", help="Load new versions and names as they are exported.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show requests and latency.")] = False,
    detached: Annotated[
        bool, typer.Option("--detach", help="Run in the background; return once the server is ready.")
    ] = False,
    log: Annotated[Path | None, typer.Option(help="Write Triton's log to this file.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the models to load.")] = 120.0,
    token: Token = None,
    python_models: PythonModels = False,
    public_key: PublicKey = None,
    triton_options: Annotated[
        list[str] | None, typer.Argument(help="After a lone --: options of tritonserver itself.", show_default=False)
    ] = None,
) -> None:
    """Start a Triton server on a model repository; Ctrl-C stops it.

    Examples:
        ncd-serve serve
        ncd-serve serve --repository model_repository --detach
        ncd-serve serve --host 0.0.0.0 -- --log-verbose=1
    """
    from ncd_serve.triton.serve import ServeOptions, newest_export, serve_detached, serve_until_stopped

    if repository is None:
        place = newest_export()
        repository = place.repository if place else DEFAULT_REPOSITORY
        say(f"serving {repository}{f', to which the newest run was exported as {place.model}' if place else ''}")
    options = ServeOptions(
        repository,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        watch=watch,
        quiet=quiet,
        log=log,
        timeout=timeout,
        token=checked_token(token),
        python_models=python_models,
        public_key=public_key,
        triton_options=triton_options or (),
    )
    if detached:
        answer(serve_detached(options, progress=Progress(messages)))
    else:
        serve_until_stopped(options, ready=answer, progress=Progress(messages))


def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the servers that run on this machine, and whether they answer.

    Examples:
        ncd-serve status
        ncd-serve status --json
    """
    from ncd_serve.triton.registry import running_servers

    servers = [(server, server.trouble()) for server in running_servers()]
    if as_json:
        facts = [
            {**server.model_dump(mode="json", exclude={"headers", "born", "activity"}), "trouble": why}
            for server, why in servers
        ]
        out.print_json(json.dumps(facts))
    elif servers:
        fixed = [Column(name, no_wrap=True) for name in ("id", "gRPC", "HTTP", "runs for")]
        table = Table(*fixed, Column("state", overflow="fold"), Column("repository", overflow="fold"))
        for server, why in servers:
            state = f"[red]{why}" if why else "[green]answers"
            table.add_row(
                str(server.pid), server.grpc_url, server.http_url, _age(server), state, str(server.repository)
            )
        out.print(table)
    if not servers:
        raise ServerError("no server runs on this machine", hint="start one with: ncd-serve serve --detach")
    if any(why for _, why in servers):
        raise typer.Exit(ServerError.exit_code)


def stop(
    ids: Annotated[
        list[int] | None, typer.Argument(help="Ids that `ncd-serve status` shows.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all servers.")] = False,
) -> None:
    """Stop servers on this machine; requests in flight may finish.

    Examples:
        ncd-serve stop
        ncd-serve stop --all
    """
    from ncd_serve.triton.registry import choose_servers

    for server in choose_servers(ids or (), everything=everything):
        with messages.status(f"stopping {server.pid}"):
            server.stop(timeout=_STOP_SECONDS)
        answer(f"stopped {server.pid}, {server.repository}")


def _age(server: RunningServer) -> str:
    minutes = int(time.time() - server.since) // 60
    return f"{minutes // 60} h {minutes % 60} min"
