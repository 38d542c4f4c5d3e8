"""`studio`: the live page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import answer, progress
from ncd_serve.cli.options import Token
from ncd_serve.errors import needs_extra


def studio(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|BUNDLE|FOLDER",
            help="A finished run, a bundle, or a folder of images to train on; default: the newest run.",
        ),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Present folder of the images, if they were moved since training.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need one of this machine's own.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int | None, typer.Option(help="Port; default 8020, or a free one if that is taken.")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    token: Token = None,
) -> None:
    """Look at clusters, name and correct them, ask about new images, train and serve, in one live page.

    Examples:
        ncd-serve studio
        ncd-serve studio runs/birds --no-browser
    """
    with needs_extra("studio"):
        from ncd_serve.studio.start import run_studio

    def ready(address: str) -> None:
        answer(f"studio: {address}\nstop:   Ctrl-C")

    run_studio(
        source, images=images, host=host, port=port, token=token, browser=browser, ready=ready, progress=progress
    )
