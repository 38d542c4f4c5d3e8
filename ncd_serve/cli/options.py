"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelName = Annotated[str, typer.Option(help="The model's name in the repository.")]
Images = Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")]
TopK = Annotated[int, typer.Option(min=1, help="How many likely clusters to list for each image.")]
Output = Annotated[
    Path | None, typer.Option("--out", help="Write rows to a .csv, .jsonl or .parquet file, not the terminal.")
]
