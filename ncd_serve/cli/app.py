"""The `ncd-serve` command: its sub-commands, and how errors become exit codes.

Sub-commands import modules when they run: `--help`, `query`, `assign`, `serve`, `name`, `doctor` never import torch.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from ncd_serve import __version__
from ncd_serve.cli import (
    assign,
    backbones,
    compare,
    config,
    demo,
    deploy,
    discover,
    doctor,
    drift,
    estimate_k,
    evaluate,
    export,
    gallery,
    name,
    plan,
    pretrain,
    query,
    serve,
    studio,
    train,
)
from ncd_serve.cli.console import exit_with
from ncd_serve.errors import NcdError

EXIT_CODES = (
    "Exit codes: 0 ok, 1 a bug, 2 wrong usage, 3 data, 4 export mismatch, 5 server, 6 missing extra, 130 interrupted."
)

app = typer.Typer(
    name="ncd-serve",
    help="Discover unnamed image categories, export the model to ONNX, serve cluster ids on NVIDIA Triton.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(train.train)
app.command()(pretrain.pretrain)
app.command()(backbones.backbones)
app.command()(estimate_k.estimate_k)
app.command()(evaluate.evaluate)
app.command()(compare.compare)
app.add_typer(config.app, name="config")
app.command()(export.export)
app.command()(serve.serve)
app.command()(serve.status)
app.command()(serve.stop)
app.command()(query.query)
app.command()(assign.assign)
app.command()(gallery.gallery)
app.command()(studio.studio)
app.add_typer(name.app, name="name")
app.command()(drift.drift)
app.command()(discover.discover)
app.command()(discover.history)
app.command()(plan.plan)
app.add_typer(deploy.app, name="deploy")
app.command()(doctor.doctor)
app.command()(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ncd-serve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Declare the options before the sub-command."""


def main() -> None:
    """Run the command line; a user's mistake ends in two lines and an exit code, never in a traceback."""
    # A terminated command must still stop its server and remove its unfinished files.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except (Exception, KeyboardInterrupt) as error:
        if _is_interruption(error):
            sys.exit(130)
        if isinstance(error, NcdError):
            exit_with(error)
        raise


def _is_interruption(error: BaseException | None) -> bool:
    """Return whether an error comes of Ctrl-C: packages in C make an ImportError of it while they are loaded."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)
