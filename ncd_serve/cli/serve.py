"""`serve`: a real Triton on a model repository, until it is told to stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import messages, out


def serve(
    repository: Annotated[Path, typer.Option(help="Triton model repository.")] = Path("model_repository"),
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need 0.0.0.0.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(help="Port for gRPC.")] = 8001,
    http_port: Annotated[int, typer.Option(help="Port for HTTP.")] = 8000,
    metrics_port: Annotated[int, typer.Option(help="Port for Prometheus metrics.")] = 8002,
    log: Annotated[Path | None, typer.Option(help="Write Triton's log to this file.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that the models may take to load.")] = 120.0,
) -> None:
    """Start a Triton server on a model repository; Ctrl-C stops it."""
    from ncd_serve.errors import ServerError
    from ncd_serve.triton import TritonServer

    server = TritonServer(
        repository, host=host, grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port, log_path=log
    )
    try:
        with messages.status("starting Triton"):
            server.start()
            server.wait_ready(timeout)
        out.print(
            f"Triton is ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}\n"
            f"try: ncd-serve query IMAGES --url grpc://{server.grpc_url}      (Ctrl-C stops the server)",
            highlight=False,
            soft_wrap=True,
        )
        while server.is_running():
            time.sleep(0.2)
        raise ServerError("Triton has ended by itself", hint="run again with --log FILE and read the file's end")
    finally:
        with messages.status("stopping Triton"):
            server.stop()
