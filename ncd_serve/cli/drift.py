"""`drift`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ncd_serve.cli.console import answer, messages, out, show_next
from ncd_serve.places import bundle_of

if TYPE_CHECKING:
    from ncd_serve.drift.find import Drift

_MAX_CLUSTERS_PRINTED = 5  # clusters whose shares are printed


def drift(
    rows: Annotated[Path, typer.Argument(help="Rows that `query` or `assign` wrote: .csv, .jsonl or .parquet.")],
    bundle: Annotated[Path, typer.Option(help="Bundle of the model that made the rows, or its run.")],
    plot: Annotated[Path | None, typer.Option(help="Plot file; default ROWS.drift.svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a batch of new images for drift from the training images.

    Examples:
        ncd-serve drift rows.csv --bundle runs/birds/bundle
    """
    from ncd_serve.drift.find import find_drift
    from ncd_serve.drift.plot import draw_drift

    bundle = bundle_of(bundle)
    found = find_drift(rows, bundle)
    target = plot or rows.with_name(f"{rows.name}.drift.svg")
    draw_drift(found, target, title=rows.name)
    if as_json:
        measures = [{**asdict(measure), "drifted": measure.drifted} for measure in found.measures]
        out.print_json(json.dumps({"drifted": found.drifted, **asdict(found), "measures": measures}))
        return
    _show(found)
    answer(f"picture: {target}")
    if found.drifted:
        look = f"look at them: ncd-serve gallery {shlex.quote(str(rows))} --bundle {shlex.quote(str(bundle))}"
        messages.print(look, markup=False, highlight=False, soft_wrap=True)
    else:
        answer("too few new images to be drift can be a new category")
    show_next("discover", rows, "--bundle", bundle)


def _show(found: Drift) -> None:
    verdict = "[red]not like[/red]" if found.drifted else "[green]like[/green]"
    unreadable = f", {found.unreadable} more cannot be read" if found.unreadable else ""
    out.print(f"{found.images} images{unreadable}: {verdict} the images of training", highlight=False)
    table = Table("question", "difference", "limit", "verdict", "the difference is")
    for measure in found.measures:
        verdict = "[red]drifted[/red]" if measure.drifted else "[green]ok[/green]"
        table.add_row(measure.name, f"{measure.difference:.3f}", f"{measure.limit:.3f}", verdict, measure.meaning)
    out.print(table)
    changed = sorted(found.shares, key=lambda share: -abs(share.batch - share.training))[:_MAX_CLUSTERS_PRINTED]
    table = Table("cluster", "name", "share in training", "share now", title="changed most", title_justify="left")
    for share in changed:
        table.add_row(str(share.cluster_id), escape(share.name), f"{share.training:.3f}", f"{share.batch:.3f}")
    out.print(table)
