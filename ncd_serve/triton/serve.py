"""Serving of a model repository with Triton: as a context for programs, until stopped for the command."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from ncd_serve.client.client import Client
from ncd_serve.contract import DEFAULT_MODEL, DEFAULT_URL, TOKEN_VARIABLE, checked_token
from ncd_serve.errors import DataError, NcdError, UsageError, did_you_mean
from ncd_serve.places import ExportPlace, exported_to, newest_bundle
from ncd_serve.progress import Progress
from ncd_serve.triton.activity import ActivityDisplay
from ncd_serve.triton.background import detach
from ncd_serve.triton.jpeg import jpeg_model_name
from ncd_serve.triton.process import USUAL_PORTS
from ncd_serve.triton.registry import (
    RunningServer,
    default_log,
    holder_of,
    registered,
    running_servers,
    server_of,
)
from ncd_serve.triton.repository import model_folders
from ncd_serve.triton.server import TritonServer
from ncd_serve.triton.supervise import Supervisor, Updates

if TYPE_CHECKING:
    from types import TracebackType

READY_SECONDS = 120.0


def serve(
    repository: str | Path = "model_repository",
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    grpc_port: int | None = None,
    http_port: int | None = None,
    metrics_port: int | None = None,
    log: str | Path | None = None,
    timeout: float = READY_SECONDS,
    token: str | None = None,
    allow_python_models: bool = False,
    public_key: str | None = None,
    triton_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Server:
    """Start Triton on a model repository and wait until it is ready.

        with serve("model_repository") as server:
            rows = list(server.client.assign(["new/"]))

    Without `with`, the server runs until its `stop` is called or this process ends. Omitted ports are free
    ones, so that several servers can run. `model` is the one that `client` asks; by default the exported one. Clients
    have to send the `token`, or that of the environment variable NCD_SERVE_TOKEN, if there is one. With a
    `public_key` of minisign, a file or its text, models that its owner did not sign are refused.
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
        token=checked_token(token),
        python_models=allow_python_models,
        public_key=public_key,
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
    """Running Triton server, with a client for one of its models. Use it as a context, or call `stop`."""

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
        return Client(f"{self._triton.grpc_scheme}://{self.grpc_url}", model=self.model, token=self._triton.token)

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
    """Settings of a server that runs until it is stopped. Ports that are None are the usual ones, if free."""

    repository: Path
    host: str = "127.0.0.1"
    http_port: int | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None
    watch: bool = True  # load new versions as they are exported
    quiet: bool = False  # show no requests and latency
    log: Path | None = None
    timeout: float = READY_SECONDS
    token: str = ""
    python_models: bool = False  # serve models that run code of their own
    public_key: str | None = None  # refuse models that its owner did not sign
    triton_options: Sequence[str] = ()

    @property
    def ports(self) -> tuple[int | None, int | None, int | None]:
        """The ports that were asked for, in the order of the usual ones."""
        return self.http_port, self.grpc_port, self.metrics_port


def serve_detached(options: ServeOptions, *, progress: Progress) -> str:
    """Start a server in a background process; return the message of the ready server."""
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
    if warning := exposure(options.host, token=bool(options.token), tls=server.grpc_scheme == "grpcs"):
        progress.say(f"warning: {warning}")
    try:
        updates = Updates(repository) if options.watch else None
        with progress.status("starting Triton"):
            server.start()
            server.wait_ready(options.timeout)
        with registered(server, repository=repository, log=log) as note:
            ready("\n".join([*_taken(options, server), greeting(server, repository, how_to_stop)]))
            supervisor = Supervisor(server, start_seconds=options.timeout, tell=_with_time(progress))
            with nullcontext() if options.quiet else ActivityDisplay(server, progress.console) as display:

                def show() -> None:
                    with suppress(OSError):  # a full disk is no reason to stop answering
                        note()
                    if display:
                        display.update()

                supervisor.run(updates=updates, show=show)
    finally:
        with progress.status("stopping Triton: requests in flight may finish (Ctrl-C drops them)"):
            server.stop()


def _taken(options: ServeOptions, server: TritonServer) -> list[str]:
    """Return a line that says who has the usual ports, if this server could not have them."""
    ports = zip(options.ports, USUAL_PORTS, server.ports, strict=True)
    taken = [usual for wanted, usual, port in ports if wanted is None and port != usual]
    holders = " and ".join(sorted({holder_of(port) for port in taken}))
    return [f"note: free ports instead of {', '.join(map(str, taken))}, which {holders} has"] if taken else []


def _prepared(options: ServeOptions, log: Path | None) -> TritonServer:
    http, grpc, metrics = options.ports
    return TritonServer(
        options.repository,
        host=options.host,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        preferred_ports=USUAL_PORTS,
        log_path=log,
        live_updates=options.watch,
        token=options.token,
        python_models=options.python_models,
        public_key=options.public_key,
        extra_arguments=options.triton_options,
    )


def exposure(host: str, *, token: bool, tls: bool) -> str:
    """Return what is dangerous about a server that listens on `host`; nothing if only this machine reaches it."""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    dangers = [
        *([] if token else ["who reaches it gets answers (--token)"]),
        *([] if tls else ["others on the way can read along (TLS: -- --grpc-use-ssl=true, or a gateway)"]),
    ]
    return "" if local or not dangers else f"other machines can reach {host}: {'; '.join(dangers)}"


def _with_time(progress: Progress) -> Callable[[str], None]:
    return lambda text: progress.say(f"{time.strftime('%H:%M:%S')} {text}")


def server_and_model(url: str | None, model: str | None) -> tuple[str, str]:
    """Return address and model of a server; what is not given is that of the newest run, if this machine serves it."""
    place = newest_export()
    servers = running_servers()
    if url is None:
        server = (server_of(place.repository) if place else None) or _only(servers)
    else:
        server = next((each for each in servers if url.endswith((each.grpc_url, each.http_url))), None)
    if model is None and server is not None:
        same = place is not None and place.repository.resolve() == server.repository
        model = place.model if same and place else _chosen_model(server.repository, None)
    return url or (f"grpc://{server.grpc_url}" if server else DEFAULT_URL), model or DEFAULT_MODEL


def newest_export() -> ExportPlace | None:
    """Return what the newest exported run here was exported to; None if there is none."""
    try:
        return exported_to(newest_bundle())
    except DataError:
        return None


def _only(servers: Sequence[RunningServer]) -> RunningServer | None:
    if len(servers) > 1:
        listed = ", ".join(f"grpc://{server.grpc_url} ({server.repository})" for server in servers)
        raise UsageError(f"several servers run: {listed}", hint="choose one with --url")
    return servers[0] if servers else None


def _chosen_model(repository: Path, wanted: str | None) -> str:
    """Return the model for clients: the requested one, else the default one, else the first."""
    names = [model.name for model in model_folders(repository)]
    if wanted is not None and wanted not in names:
        raise UsageError(f"{repository} has no model '{wanted}'", hint=did_you_mean(wanted, names))
    # The models for image files are asked by curl, not by our clients.
    asked = [name for name in names if jpeg_model_name(name) in names] or names
    return wanted or (DEFAULT_MODEL if DEFAULT_MODEL in asked else asked[0])


def greeting(server: TritonServer, repository: Path, how_to_stop: str) -> str:
    """Return the message of a ready server: its addresses, and a line for every way to send requests."""
    name = _chosen_model(repository, None)
    lines = request_lines(server.grpc_url, server.http_url, repository, name=name, token=bool(server.token))
    return "\n".join(
        [
            f"Triton is ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}",
            *(f"{way + ':':7} {line}" for way, line in lines.items()),
            f"stop:   {how_to_stop}",
        ]
    )


def request_lines(grpc_url: str, http_url: str, repository: Path, *, name: str, token: bool) -> dict[str, str]:
    """Return a line to copy for every way to send requests to a model."""
    model = "" if name == DEFAULT_MODEL else f" --model-name {name}"
    keyword = "" if name == DEFAULT_MODEL else f', model="{name}"'
    client = f'Client("grpc://{grpc_url}"{keyword})'
    lines = {
        "shell": f"ncd-serve query IMAGES --url grpc://{grpc_url}{model}",
        "Python": f'from ncd_serve import Client; print(*{client}.assign(["bird.jpg"]))',
    }
    if (repository / jpeg_model_name(name)).is_dir():
        path = f"http://{http_url}/v2/models/{jpeg_model_name(name)}/infer"
        header = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if token else ""
        lines["curl"] = (
            f"curl -s {path} -H 'Inference-Header-Content-Length: 0'{header} --data-binary @bird.jpg"
            " | grep -ao '{\"cluster_id.*}'"
        )
    return lines
