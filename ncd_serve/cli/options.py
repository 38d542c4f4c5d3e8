"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.contract import TOKEN_VARIABLE


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
ModelName = Annotated[str, typer.Option(help="The model's name in the repository.")]
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
