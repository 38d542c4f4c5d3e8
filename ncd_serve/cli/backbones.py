"""`backbones`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ncd_serve.cli.console import out, progress
from ncd_serve.errors import needs_extra


def backbones(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name, or a pattern, e.g. '*dinov2*'.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the speed of each on this machine.")] = False,
) -> None:
    """List backbones for `train --backbone`: size, licence, and whether weights are at hand.

    Examples:
        ncd-serve backbones
        ncd-serve backbones '*dinov2*'
    """
    with needs_extra("train"):
        from ncd_training.study.backbone_list import list_backbones

        rows, more = list_backbones(pattern, measure=measure, progress=progress)
    table = Table(
        "name",
        "weights",
        "px",
        "licence",
        "at hand",
        *(["images/s", "cut"] if measure else []),
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.columns[0].overflow = "fold"
    for row in rows:
        speed = "" if row.images_per_second is None else f"{row.images_per_second:.1f}"
        licence = f"{row.licence} *" if row.restricted else row.licence
        cells = [row.name, f"{row.weights / 1e6:.1f} M", str(row.size), licence, row.origin]
        table.add_row(*cells, *([speed, row.cut] if measure else []))
    out.print(table)
    if more:
        out.print(f"and {more} more: give a longer part of the name", highlight=False)
    if any(row.restricted for row in rows):
        out.print(
            "* restricts commercial use or redistribution, also of a model made from the weights", highlight=False
        )
    out.print("next: ncd-serve train --backbone NAME --labelled known --unlabelled pile", highlight=False)
