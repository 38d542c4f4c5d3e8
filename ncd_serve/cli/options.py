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


ModelName = Annotated[str, typer.Option(help="The model's name in the repository.")]
Images = Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")]
Form = Annotated[
    RowFormat | None,
    typer.Option("--format", help="How to print rows; default: a table on a terminal, csv elsewhere."),
]
TopK = Annotated[int, typer.Option(min=1, help="How many likely clusters to list for each image.")]
Output = Annotated[
    Path | None, typer.Option("--out", help="Write rows to a .csv, .jsonl or .parquet file, not the terminal.")
]
