"""`discover` and `history`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from ncd_serve.cli.console import out, progress
from ncd_serve.errors import UsageError

_MAX_EXAMPLES = 3
_MAX_KNOWN_PRINTED = 5


def discover(
    images: Annotated[Path, typer.Argument(help="New images: a folder, or rows that `query` or `assign` wrote.")],
    bundle: Annotated[Path, typer.Option(help="Bundle whose clusters the images are compared with.")],
    target: Annotated[Path, typer.Option("--out", help="File for the candidates.")] = Path("candidates.json"),
    min_strength: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Smallest probability of a new category to propose it.")
    ] = 0.95,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for new categories in a batch of images: groups that are no cluster and no known class.

    Examples:
        ncd-serve discover new --bundle runs/birds/bundle
        ncd-serve discover rows.csv --bundle runs/birds/bundle --out candidates.json
    """
    from ncd_serve.discovery.find import discover as find
    from ncd_serve.files import write_json

    if target.exists():
        raise UsageError(f"{target} exists", hint="choose another --out")
    found = find(images, bundle, min_strength=min_strength, progress=progress)
    content = found.candidates.model_dump(mode="json")
    if found.candidates.candidates:
        write_json(target, content)
    if as_json:
        facts = {name: getattr(found, name) for name in ("images", "unreadable", "outside", "known")}
        out.print_json(json.dumps({**facts, **content}))
        return
    unreadable = f", {found.unreadable} more cannot be read" if found.unreadable else ""
    candidates = found.candidates.candidates
    what = f"[bold]{len(candidates)}[/bold] candidates for new categories" if candidates else "no new category"
    out.print(
        f"{found.images} images{unreadable}: {what}; {found.outside} images are probably in none of the clusters",
        highlight=False,
    )
    if found.known:
        shown = list(found.known.items())[:_MAX_KNOWN_PRINTED]
        text = ", ".join(f"{name} {count}" for name, count in shown)
        more = ", ..." if len(found.known) > len(shown) else ""
        out.print(f"like known classes: {sum(found.known.values())} ({text}{more})", markup=False, highlight=False)
    if not candidates:
        return
    table = Table(
        Column("candidate", justify="right"),
        Column("images", justify="right"),
        Column("strength", justify="right"),
        Column("purity", justify="right"),
        "nearest",
        Column("most central images", overflow="fold"),
    )
    for number, each in enumerate(candidates):
        examples = ", ".join(Path(path).name for path in each.images[:_MAX_EXAMPLES])
        figures = (str(len(each.images)), f"{each.strength:.3f}", f"{each.purity:.2f}")
        table.add_row(str(number), *figures, escape(each.nearest), escape(examples))
    out.print(table)
    out.print(
        f"names can be written into {target}; entries that are no category can be removed from it\n"
        f"next: ncd-serve train --after {bundle} --add {images} --accept {target}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def history(
    bundle: Annotated[Path, typer.Argument(help="A bundle.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the generations that a bundle descends from, with what changed, scores, and how to serve each of them again.

    Scores are those of the training that a generation comes from: ACC where true classes are known, and the verdict
    without them. An append keeps both.

    Examples:
        ncd-serve history runs/birds/bundle
    """
    from ncd_serve.discovery.history import generations

    found = generations(bundle)
    if as_json:
        out.print_json(json.dumps([each._asdict() for each in found]))
        return
    table = Table(
        Column("generation", justify="right"),
        "created",
        Column("images", justify="right"),
        Column("clusters", justify="right"),
        "changes",
        "ACC",
        "verdict",
        Column("bundle", overflow="fold"),
    )
    for each in found:
        scores = ", ".join(f"{split} {acc:.3f}" for split, acc in each.scores.items()) or "-"
        images = "-" if each.images is None else str(each.images)
        words = (each.changes, scores, each.verdict or "-", each.folder or "gone")
        table.add_row(str(each.generation), each.created, images, str(each.clusters), *map(escape, words))
    out.print(table)
    if kept := [each for each in found if each.folder]:
        out.print(
            f"next: ncd-serve export {kept[-1].folder}    (any of them can be served again)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
