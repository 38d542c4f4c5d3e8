"""`recipes`."""

from __future__ import annotations

from rich.table import Column, Table

from ncd_serve.cli.console import out
from ncd_serve.errors import needs_extra


def recipes() -> None:
    """List recipes for `train --recipe`, those for your own images first.

    Examples:
        ncd-serve recipes
    """
    with needs_extra("train"):
        from ncd_training.config.resolve import listed_recipes

    for title, group in listed_recipes().items():
        table = Table.grid(Column(no_wrap=True, width=20), Column(), padding=(0, 1))
        for name, line in group.items():
            table.add_row(f"  {name}", line)
        out.print(f"[bold]{title}[/bold]", table, sep="\n", highlight=False)
    out.print("next: ncd-serve config show --recipe NAME    (all settings)", highlight=False, soft_wrap=True)
