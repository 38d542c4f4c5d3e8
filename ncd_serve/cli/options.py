"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class RowFormat(str, Enum):
    """How rows are printed."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


class Engine(str, Enum):
    """What runs a bundle."""

    PLAIN = "plain"
    RAY = "ray"


# Of commands that train.
Dataset = Annotated[str | None, typer.Option(help="A named dataset, e.g. glyphs or cub200.")]
DataRoot = Annotated[Path | None, typer.Option(help="Where the named dataset is; default data.")]
Labelled = Annotated[Path | None, typer.Option(help="Your images: one folder for each known class.")]
Unlabelled = Annotated[Path | None, typer.Option(help="Your images that nobody named, flat or nested.")]
ManifestFile = Annotated[Path | None, typer.Option(help="Your images in a CSV file: path,label,split.")]
StrictData = Annotated[bool, typer.Option("--strict-data", help="Stop at unusable images.")]
Weights = Annotated[
    Path | None, typer.Option(help="Weights to start from: MoCo v2, RotNet, torchvision, timm, DINO, or a run.")
]
NovelClasses = Annotated[
    str | None, typer.Option(metavar="N|auto", help="How many clusters to find; auto: estimated first.")
]
CacheViews = Annotated[
    int | None, typer.Option(min=0, help="Compute the frozen trunk once for so many views of each image.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of all random choices.")]

ModelName = Annotated[str, typer.Option(help="The model's name in the repository.")]
Images = Annotated[
    list[str],
    typer.Argument(
        help="Image files, folders of them, quoted patterns, .zip and .tar[.gz|.bz2|.xz] archives; - reads a list of "
        "files from standard input."
    ),
]
AllowUrls = Annotated[bool, typer.Option("--allow-urls", help="Let http(s) URLs be images, too, and fetch them.")]
Form = Annotated[
    RowFormat | None,
    typer.Option("--format", help="How to print rows; default: a table on a terminal, csv elsewhere."),
]
TopK = Annotated[int, typer.Option(min=1, help="How many likely clusters to list for each image.")]
Output = Annotated[
    Path | None, typer.Option("--out", help="Write rows to a .csv, .jsonl or .parquet file, not the terminal.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the --out of a command that was interrupted.")]
MinConfidence = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Rows with less confidence get the status `unsure`.")
]
