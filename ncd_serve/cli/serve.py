"""`serve`, `status` and `stop`: a real Triton on a model repository, until it is told to stop."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from ncd_serve.cli.console import messages, out
from ncd_serve.errors import NcdError, ServerError, UsageError

if TYPE_CHECKING:
    from ncd_serve.cli.background import Background
    from ncd_serve.triton import TritonServer
    from ncd_serve.triton.registry import RunningServer

_STOP_SECONDS = 40  # more than the drain of a server takes at most
_USUAL_PORT = "default {}, or a free one if that is taken; 0 for a free one"


def serve(
    repository: Annotated[Path, typer.Option(help="Triton model repository.")] = Path("model_repository"),
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need 0.0.0.0.")] = "127.0.0.1",
    grpc_port: Annotated[int | None, typer.Option(help=f"Port for gRPC; {_USUAL_PORT.format(8001)}.")] = None,
    http_port: Annotated[int | None, typer.Option(help=f"Port for HTTP; {_USUAL_PORT.format(8000)}.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help=f"Port for metrics; {_USUAL_PORT.format(8002)}.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Load new versions as they are exported.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show requests and latency.")] = False,
    detached: Annotated[bool, typer.Option("--detach", help="Return once it is ready, and let it run.")] = False,
    log: Annotated[Path | None, typer.Option(help="Write Triton's log to this file.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that the models may take to load.")] = 120.0,
    triton_options: Annotated[
        list[str] | None, typer.Argument(help="After a lone --: options of tritonserver itself.", show_default=False)
    ] = None,
) -> None:
    """Start a Triton server on a model repository; Ctrl-C stops it."""
    from ncd_serve.cli.background import detach
    from ncd_serve.triton import TritonServer
    from ncd_serve.triton.process import USUAL_PORTS, usual_or_free
    from ncd_serve.triton.registry import default_log

    background = None
    if detached:
        log = (log or default_log()).absolute()
        background = detach(log)
    try:
        wanted = zip((http_port, grpc_port, metrics_port), USUAL_PORTS, strict=True)
        ports = [usual_or_free(host, *pair) for pair in wanted]
        server = TritonServer(
            repository,
            host=host,
            http_port=ports[0],
            grpc_port=ports[1],
            metrics_port=ports[2],
            log_path=log,
            live_updates=watch,
            extra_arguments=triton_options or (),
        )
        _run(server, repository, log, timeout=timeout, watch=watch, quiet=quiet, background=background)
    except NcdError as error:
        if background:
            background.failed(error.exit_code, f"error: {error}\nhint: {error.hint or f'see the log {log}'}")
        raise


def _run(
    server: TritonServer,
    repository: Path,
    log: Path | None,
    *,
    timeout: float,
    watch: bool,
    quiet: bool,
    background: Background | None,
) -> None:
    from ncd_serve.cli.activity import ActivityDisplay
    from ncd_serve.triton import Supervisor, Updates
    from ncd_serve.triton.registry import registered

    try:
        updates = Updates(repository) if watch else None
        with messages.status("starting Triton"):
            server.start()
            server.wait_ready(timeout)
        with registered(server, repository=repository, log=log):
            if background:
                background.ready(_greeting(server, repository, f"ncd-serve stop     (log: {log})"))
            else:
                text = _greeting(server, repository, "Ctrl-C")
                out.print(text, highlight=False, markup=False, soft_wrap=True)
            supervisor = Supervisor(server, start_seconds=timeout, tell=_tell)
            with nullcontext() if quiet else ActivityDisplay(server) as display:
                supervisor.run(updates=updates, show=display.update if display else lambda: None)
    finally:
        with messages.status("stopping Triton: requests that are under way may finish (Ctrl-C drops them)"):
            server.stop()


def _tell(text: str) -> None:
    messages.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)


def _greeting(server: TritonServer, repository: Path, how_to_stop: str) -> str:
    """Where it listens, and a line for every way to ask it."""
    from ncd_serve.client.client import DEFAULT_MODEL
    from ncd_serve.triton import check_repository, jpeg_model_name

    names = check_repository(repository)
    asked = [name for name in names if jpeg_model_name(name) in names] or names
    name = DEFAULT_MODEL if DEFAULT_MODEL in asked else asked[0]
    model = "" if name == DEFAULT_MODEL else f" --model-name {name}"
    keyword = "" if name == DEFAULT_MODEL else f', model="{name}"'
    lines = [
        f"Triton is ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}",
        f"shell:  ncd-serve query IMAGES --url grpc://{server.grpc_url}{model}",
        f'Python: from ncd_serve import Client; print(*Client("grpc://{server.grpc_url}"{keyword}).assign(["bird.jpg"]))',
    ]
    if jpeg_model_name(name) in names:
        path = f"http://{server.http_url}/v2/models/{jpeg_model_name(name)}/infer"
        lines.append(
            f"curl:   curl -s {path} -H 'Inference-Header-Content-Length: 0' --data-binary @bird.jpg"
            " | grep -ao '{\"cluster_id.*}'"
        )
    return "\n".join([*lines, f"stop:   {how_to_stop}"])


def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the servers that run on this machine, and whether they answer."""
    from ncd_serve.triton.registry import running_servers

    servers = [(server, server.trouble()) for server in running_servers()]
    if as_json:
        facts = [
            {**server.model_dump(mode="json", exclude={"headers", "born"}), "trouble": why} for server, why in servers
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
    everything: Annotated[bool, typer.Option("--all", help="Stop all of them.")] = False,
) -> None:
    """Stop servers that run on this machine; requests that are under way may finish."""
    from ncd_serve.triton.registry import running_servers

    servers = {server.pid: server for server in running_servers()}
    if not servers:
        raise ServerError("no server runs on this machine", hint="ncd-serve status shows those that do")
    if not ids and not everything and len(servers) > 1:
        raise UsageError("several servers run", hint=f"name one of {', '.join(map(str, servers))}, or use --all")
    if unknown := set(ids or ()) - set(servers):
        raise UsageError(f"no server has the id {min(unknown)}", hint="ncd-serve status shows them")
    for pid in ids or servers:
        with messages.status(f"stopping {pid}"):
            servers[pid].stop(timeout=_STOP_SECONDS)
        out.print(f"stopped {pid}, {servers[pid].repository}", highlight=False, soft_wrap=True)


def _age(server: RunningServer) -> str:
    minutes = int(time.time() - server.since) // 60
    return f"{minutes // 60} h {minutes % 60} min"
