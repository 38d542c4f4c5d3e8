"""`query` and `assign`: the same rows, from a Triton server or from a bundle in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from ncd_serve.cli.console import messages, out
from ncd_serve.cli.options import Form, Images, ModelName, Output, RowFormat, TopK
from ncd_serve.prediction import Prediction
from ncd_serve.runners import Runner


def query(
    images: Images,
    url: Annotated[str, typer.Option(help="The Triton server's gRPC address.")] = "grpc://127.0.0.1:8001",
    model_name: ModelName = "ncd_global",
    output: Output = None,
    form: Form = None,
    top_k: TopK = 3,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer.")] = 30.0,
) -> None:
    """Ask a Triton server for the cluster ids of images."""
    from ncd_serve.client import Client

    paths = _check(images, output)
    _write(paths, Client(url, model=model_name, timeout=timeout), output, form, top_k)


def assign(
    images: Images,
    bundle: Annotated[Path, typer.Option(help="A bundle that `ncd-serve export` made.")],
    output: Output = None,
    form: Form = None,
    top_k: TopK = 3,
) -> None:
    """Cluster ids of images without a server, through ONNX Runtime."""
    from ncd_serve.bundle import Bundle
    from ncd_serve.runners import OnnxRunner

    paths = _check(images, output)
    _write(paths, OnnxRunner(Bundle.read(bundle)), output, form, top_k)


def _check(images: list[Path], output: Path | None) -> list[Path]:
    from ncd_serve.images import find_images
    from ncd_serve.tables import check_format

    if output is not None:
        check_format(output)
    return find_images(images)


def _write(paths: list[Path], runner: Runner, output: Path | None, form: RowFormat | None, top_k: int) -> None:
    from ncd_serve.assignment import assign_images
    from ncd_serve.tables import terminal_table, write_csv, write_jsonl, write_rows

    rows: Iterable[Prediction] = track(
        assign_images(paths, runner, top_k=top_k),
        "asking",
        total=len(paths),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    )
    if output is not None:
        write_rows(rows, output)
        messages.print(f"{len(paths)} rows in [bold]{output}[/bold]", highlight=False)
    elif form is RowFormat.TABLE or (form is None and out.is_terminal):
        out.print(terminal_table(rows))
    else:
        (write_jsonl if form is RowFormat.JSONL else write_csv)(rows, sys.stdout)
