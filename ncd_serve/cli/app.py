"""The `ncd-serve` command: its sub-commands, and how errors become exit codes.

Sub-commands import modules when they run: `--help`, `query`, `assign`, `serve`, `name`, `doctor` never import torch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated

import typer

from ncd_serve import __version__
from ncd_serve.cli import (
    assign,
    backbones,
    compare,
    completion,
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
    recipes,
    serve,
    sign,
    studio,
    train,
)
from ncd_serve.cli.console import exit_with
from ncd_serve.cli.help import LOOK, OPERATE, RESEARCH, START, Group, command
from ncd_serve.errors import NcdError

EXIT_CODES = (
    "Exit codes: 0 ok, 1 a bug, 2 wrong usage, 3 data, 4 export mismatch, 5 server, 6 missing extra, 130 interrupted."
)

app = typer.Typer(
    name="ncd-serve",
    cls=Group,
    help="Find, name and serve the image classes nobody labelled.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
completion.add_to_options()
PANELS: dict[str, list[Callable[..., None]]] = {
    START: [demo.demo, train.train, gallery.gallery, export.export, serve.serve, query.query],
    LOOK: [studio.studio, assign.assign, drift.drift, discover.discover, discover.history],
    RESEARCH: [
        recipes.recipes,
        backbones.backbones,
        evaluate.evaluate,
        estimate_k.estimate_k,
        compare.compare,
        pretrain.pretrain,
    ],
    OPERATE: [serve.status, serve.stop, sign.sign, doctor.doctor, plan.plan],
}
for panel, functions in PANELS.items():
    for function in functions:
        command(app, panel=panel)(function)
app.add_typer(name.app, name="name", rich_help_panel=LOOK)
app.add_typer(deploy.app, name="deploy", rich_help_panel=OPERATE)
app.add_typer(config.app, name="config", rich_help_panel=RESEARCH)


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
