"""`query`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from ncd_serve.cli.console import messages, out
from ncd_serve.cli.options import AllowUrls, Form, Images, MinConfidence, Output, Resume, Token, TopK
from ncd_serve.contract import DEFAULT_URL
from ncd_serve.errors import UsageError
from ncd_serve.progress import Progress


def query(
    images: Images,
    url: Annotated[
        str | None,
        typer.Option(
            help="The Triton server: grpc://HOST:PORT or http://HOST:PORT; grpcs and https for TLS. Default: this "
            f"machine's server of the newest run, else the only one, else {DEFAULT_URL}.",
            show_default=False,
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="The model's name; default: the exported one of a server on this machine.")
    ] = None,
    output: Output = None,
    resume: Resume = False,
    form: Form = None,
    top_k: TopK = 3,
    min_confidence: MinConfidence = 0.0,
    allow_urls: AllowUrls = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of requests in flight.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer.")] = 60.0,
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds to keep retrying a server that cannot be reached.")
    ] = 60.0,
    token: Token = None,
) -> None:
    """Ask a Triton server which cluster each image is of, and how sure that is.

    Examples:
        ncd-serve query new
        ncd-serve query 'photos/*.jpg' more.zip --out rows.csv
        ncd-serve query new --url grpc://gpu-server:8001 --model-name birds
    """
    from ncd_serve.client.client import Client
    from ncd_serve.rows.writing import RowOptions, print_rows, save_rows
    from ncd_serve.triton.serve import server_and_model

    progress, options = Progress(messages), RowOptions(top_k, min_confidence, allow_urls)
    address, model = server_and_model(url, model_name)

    @contextmanager
    def connect() -> Iterator[Client]:
        with Client(
            address, model=model, timeout=timeout, patience=patience, concurrency=concurrency, token=token
        ) as client:
            yield client
            progress.say(f"answered by {client.answered_by}")

    if output:
        save_rows(images, connect, target=output, resume=resume, options=options, progress=progress)
    elif resume:
        raise UsageError("--resume needs the --out of the interrupted run", hint="add --out FILE")
    else:
        print_rows(images, connect, form=form and form.value, options=options, out=out, progress=progress)
