"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import say
from ncd_serve.contract import TOKEN_VARIABLE
from ncd_serve.places import bundle_of, newest_bundle, newest_run


class RowFormat(str, Enum):
    """Format of printed rows."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


class Engine(str, Enum):
    """Engine that runs a bundle."""

    PLAIN = "plain"
    RAY = "ray"


Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", help="Settings on top of the dataset's own: own-images, paper, quick, released, ..."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with settings.")]
MethodName = Annotated[
    str | None, typer.Option("--method", help="dual (the paper's), rankstat, dtc, kcl, mcl, kmeans or orca.")
]
SetOptions = Annotated[list[str] | None, typer.Option("--set", help="One setting: section.key=value.")]
ResumeRun = Annotated[Path | None, typer.Option(help="Resume an interrupted run.")]

Digest = Annotated[
    str | None, typer.Option(help="Refuse the bundle unless it has this digest, which `ncd-serve export` printed.")
]
PythonModels = Annotated[
    bool, typer.Option("--allow-python-models", help="Serve models that run code of their own, if you trust them.")
]
RunArgument = Annotated[
    Path | None, typer.Argument(metavar="[RUN]", help="A run directory; default: the newest run.", show_default=False)
]
Images = Annotated[
    list[str],
    typer.Argument(
        help="Image files, folders of them, quoted patterns, .zip and .tar[.gz|.bz2|.xz] archives; - reads a list of "
        "files from standard input."
    ),
]
AllowUrls = Annotated[bool, typer.Option("--allow-urls", help="Accept http(s) URLs as images, and fetch them.")]
Form = Annotated[
    RowFormat | None,
    typer.Option("--format", help="Format of printed rows; default: a table on a terminal, csv elsewhere."),
]
TopK = Annotated[int, typer.Option(min=1, help="Number of likeliest clusters to list for each image.")]
Output = Annotated[
    Path | None, typer.Option("--out", help="Write rows to a .csv, .jsonl or .parquet file, not the terminal.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted command with the same --out.")]
MinConfidence = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Rows with less confidence get the status `unsure`.")
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar=TOKEN_VARIABLE, show_envvar=True, help="The token that the server asks of clients.", show_default=False
    ),
]


def run_or_newest(run: Path | None) -> Path:
    """Return what was given, or the newest run, and say which that is."""
    if run is None:
        run = newest_run()
        say(f"the newest run: {run}")
    return run


def bundle_or_newest(source: Path | None) -> Path:
    """Return the bundle of a run, a bundle, or the newest exported run, and say which that is."""
    if source is not None:
        return bundle_of(source)
    bundle = newest_bundle()
    say(f"the newest bundle: {bundle}")
    return bundle
