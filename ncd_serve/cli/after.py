"""`train --after`: the next generation of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Column, Table

from ncd_serve.cli.console import out, progress
from ncd_serve.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ncd_serve.bundle import BundleManifest

_OWN = ("after", "add", "accept", "out_")
_DEFAULTS = {"device": "auto"}  # of options that have one


def train_after(options: Mapping[str, object]) -> None:
    """Append the new categories of a batch to a bundle; `options` are those of `train`."""
    given = [
        name
        for name, value in options.items()
        if value not in (None, [], False, _DEFAULTS.get(name)) and name not in _OWN
    ]
    if given:
        option = f"--{given[0].strip('_').replace('_', '-')}"
        raise UsageError(f"{option} is not for --after, which trains nothing", hint="drop it")
    after, add, accept, target = (Path(str(options[name])) if options[name] else None for name in _OWN)
    if after is None or add is None:
        raise UsageError("--after and --add belong together", hint="ncd-serve train --after BUNDLE --add NEW")
    with needs_extra("export"):
        from ncd_export.append import append_generation, next_folder

    bundle = append_generation(after, add, accept=accept, out=target or next_folder(after), progress=progress)
    _show(bundle.manifest)
    out.print(
        f"generation {bundle.manifest.generation}, bundle: {bundle.folder}\nnext: ncd-serve export {bundle.folder}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _show(about: BundleManifest) -> None:
    table = Table(
        Column("cluster", justify="right"),
        "name",
        "what",
        Column("images", justify="right"),
        Column("of the batch", justify="right"),
        Column("moved", justify="right"),
    )
    for change in about.changes:
        numbers = (str(number) for number in (change.images, change.added, change.moved))
        table.add_row(str(change.cluster_id), escape(about.cluster_names[change.cluster_id]), change.kind, *numbers)
    out.print(table)
