"""Serve a model repository with Triton: for a program as a context, for the command until it is told to stop."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from ncd_serve.client.client import Client
from ncd_serve.contract import DEFAULT_MODEL
from ncd_serve.errors import NcdError, UsageError, did_you_mean
from ncd_serve.progress import Progress
from ncd_serve.triton.activity import ActivityDisplay
from ncd_serve.triton.background import detach
from ncd_serve.triton.jpeg import jpeg_model_name
from ncd_serve.triton.process import USUAL_PORTS, usual_or_free
from ncd_serve.triton.registry import default_log, registered
from ncd_serve.triton.repository import check_repository
from ncd_serve.triton.server import TritonServer
from ncd_serve.triton.supervise import Supervisor, Updates

if TYPE_CHECKING:
    from types import TracebackType

READY_SECONDS = 120.0
DEFAULT_REPOSITORY = "model_repository"


def serve(
    repository: str | Path = DEFAULT_REPOSITORY,
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    grpc_port: int | None = None,
    http_port: int | None = None,
    metrics_port: int | None = None,
    log: str | Path | None = None,
    timeout: float = READY_SECONDS,
    triton_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Server:
    """Start Triton on a model repository and wait until it is ready.

        with serve("model_repository") as server:
            rows = list(server.client.assign(["new/"]))

    Without `with`, the server runs until its `stop` is called or this process ends. Ports that are left out are free
    ones, so that several servers can run. `model` is the one that `client` asks; by default the exported one.
    """
    folder = Path(repository)
    asked = _chosen_model(folder, model)
    triton = TritonServer(
        folder,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        log_path=Path(log).absolute() if log else None,
        extra_arguments=triton_options,
    )
    try:
        with (progress or Progress(Console(stderr=True))).status("starting Triton"):
            triton.start()
            triton.wait_ready(timeout)
    except BaseException:
        triton.stop()
        raise
    return Server(triton, asked)


class Server:
    """Running Triton server with a client for one of its models, as `serve` returns it; `with` stops it at its end."""

    def __init__(self, triton: TritonServer, model: str) -> None:
        self._triton, self.model = triton, model
        atexit.register(triton.stop)

    @property
    def grpc_url(self) -> str:
        """`host:port`, as `Client` and tritonclient.grpc take it."""
        return self._triton.grpc_url

    @property
    def http_url(self) -> str:
        """`host:port`, as tritonclient.http takes it."""
        return self._triton.http_url

    @property
    def metrics_url(self) -> str:
        """The page that Prometheus reads."""
        return self._triton.metrics_url

    @cached_property
    def client(self) -> Client:
        """A client of the model over gRPC, which is closed with the server."""
        return Client(f"{self._triton.grpc_scheme}://{self.grpc_url}", model=self.model)

    def stop(self) -> None:
        """Let requests in flight finish and end the server. May be called again."""
        if "client" in vars(self):
            self.client.close()
        self._triton.stop()
        atexit.unregister(self._triton.stop)

    def __enter__(self) -> Server:
        """Return the server, which is ready already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()


@dataclass(frozen=True)
class ServeOptions:
    """Settings of a server that runs until it is told to stop. Ports that are None are the usual ones, if free."""

    repository: Path
    host: str = "127.0.0.1"
    http_port: int | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None
    watch: bool = False  # load new versions as they are exported
    quiet: bool = False  # show no requests and latency
    log: Path | None = None
    timeout: float = READY_SECONDS
    triton_options: Sequence[str] = ()


def serve_detached(options: ServeOptions, *, progress: Progress) -> str:
    """Start a server in a process of its own; returns how to reach and stop it once it is ready."""
    log = (options.log or default_log()).absolute()
    background = detach(log, progress=progress)
    if isinstance(background, str):
        return background
    how_to_stop = f"ncd-serve stop     (log: {log})"
    try:
        serve_until_stopped(options, log=log, how_to_stop=how_to_stop, ready=background.ready, progress=progress)
    except NcdError as error:
        background.failed(error)
        raise


def serve_until_stopped(
    options: ServeOptions,
    *,
    log: Path | None = None,
    how_to_stop: str = "Ctrl-C",
    ready: Callable[[str], None],
    progress: Progress,
) -> NoReturn:
    """Start a server, call `ready` with how to reach it, and keep it answering until this process is interrupted."""
    repository, log = options.repository, log or options.log
    server = _prepared(options, log)
    try:
        updates = Updates(repository) if options.watch else None
        with progress.status("starting Triton"):
            server.start()
            server.wait_ready(options.timeout)
        with registered(server, repository=repository, log=log):
            ready(greeting(server, repository, how_to_stop))
            supervisor = Supervisor(server, start_seconds=options.timeout, tell=_with_time(progress))
            with nullcontext() if options.quiet else ActivityDisplay(server, progress.console) as display:
                supervisor.run(updates=updates, show=display.update if display else lambda: None)
    finally:
        with progress.status("stopping Triton: requests in flight may finish (Ctrl-C drops them)"):
            server.stop()


def _prepared(options: ServeOptions, log: Path | None) -> TritonServer:
    wanted = zip((options.http_port, options.grpc_port, options.metrics_port), USUAL_PORTS, strict=True)
    http, grpc, metrics = (usual_or_free(options.host, *pair) for pair in wanted)
    return TritonServer(
        options.repository,
        host=options.host,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        log_path=log,
        live_updates=options.watch,
        extra_arguments=options.triton_options,
    )


def _with_time(progress: Progress) -> Callable[[str], None]:
    return lambda text: progress.say(f"{time.strftime('%H:%M:%S')} {text}")


def _chosen_model(repository: Path, wanted: str | None) -> str:
    """The model that clients ask: the wanted one, else the default one, else the first."""
    names = check_repository(repository)
    if wanted is not None and wanted not in names:
        raise UsageError(f"{repository} has no model '{wanted}'", hint=did_you_mean(wanted, names))
    # The models for image files are asked by curl, not by our clients.
    asked = [name for name in names if jpeg_model_name(name) in names] or names
    return wanted or (DEFAULT_MODEL if DEFAULT_MODEL in asked else asked[0])


def greeting(server: TritonServer, repository: Path, how_to_stop: str) -> str:
    """Message of a ready server: its addresses, and a line for every way to ask it."""
    name = _chosen_model(repository, None)
    model = "" if name == DEFAULT_MODEL else f" --model-name {name}"
    keyword = "" if name == DEFAULT_MODEL else f', model="{name}"'
    lines = [
        f"Triton is ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}",
        f"shell:  ncd-serve query IMAGES --url grpc://{server.grpc_url}{model}",
        f'Python: from ncd_serve import Client; print(*Client("grpc://{server.grpc_url}"{keyword}).assign(["bird.jpg"]))',
    ]
    if jpeg_model_name(name) in check_repository(repository):
        path = f"http://{server.http_url}/v2/models/{jpeg_model_name(name)}/infer"
        lines.append(
            f"curl:   curl -s {path} -H 'Inference-Header-Content-Length: 0' --data-binary @bird.jpg"
            " | grep -ao '{\"cluster_id.*}'"
        )
    return "\n".join([*lines, f"stop:   {how_to_stop}"])
