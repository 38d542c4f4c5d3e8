"""`discover` and `history`."""

from __future__ import annotations

import json
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from ncd_serve.cli.console import answer, out, progress, show_next
from ncd_serve.cli.options import note_newer_generation
from ncd_serve.errors import UsageError
from ncd_serve.places import bundle_of, shortened

_MAX_EXAMPLES = 3
_MAX_KNOWN_PRINTED = 5


def discover(
    images: Annotated[Path, typer.Argument(help="New images: a folder, or rows that `query` or `assign` wrote.")],
    bundle: Annotated[Path, typer.Option(help="A bundle, or a run, whose clusters the images are compared with.")],
    target: Annotated[
        Path | None, typer.Option("--out", help="File for the candidates; default: candidates.json, or the next free.")
    ] = None,
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

    if target and target.exists():
        raise UsageError(f"{target} exists", hint="choose another --out")
    target, bundle = target or _free_file(), bundle_of(bundle)
    note_newer_generation(bundle)
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
    what = f"candidates for new categories: {len(candidates)}; of the others, " if candidates else "no new category; "
    answer(f"{found.images} images{unreadable}: {what}{found.outside} are probably in none of the clusters")
    if found.known:
        shown = list(found.known.items())[:_MAX_KNOWN_PRINTED]
        text = ", ".join(f"{name} {count}" for name, count in shown)
        more = ", ..." if len(found.known) > len(shown) else ""
        answer(f"like known classes: {sum(found.known.values())} ({text}{more})")
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
    answer(f"names can be written into {target}; entries that are no category can be removed from it")
    show_next("train", "--after", bundle, "--add", images, "--accept", target)


def _free_file() -> Path:
    """Return the default file for candidates; those of earlier batches stay."""
    names = chain(["candidates.json"], (f"candidates-{number}.json" for number in count(2)))
    return next(path for path in map(Path, names) if not path.exists())


def history(
    bundle: Annotated[Path, typer.Argument(help="A bundle, or a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the generations that a bundle descends from, with what changed, scores, and how to serve each of them again.

    Scores are those of the training that a generation comes from: ACC where true classes are known, and the verdict
    without them. An append keeps both.

    Examples:
        ncd-serve history runs/birds/bundle
    """
    from ncd_serve.discovery.history import generations

    bundle = bundle_of(bundle)
    found = generations(bundle)
    note_newer_generation(bundle)
    if as_json:
        out.print_json(json.dumps([each._asdict() for each in found]))
        return
    for each in found:
        folder = shortened(Path(each.folder)) if each.folder else "gone"
        answer(f"generation {each.generation}, {each.created[:16].replace('T', ' ')}, bundle: {folder}")
        images = "" if each.images is None else f"{each.images} images, "
        answer(f"  {images}{each.clusters} clusters: {each.changes}")
        if each.scores:
            answer(f"  ACC {', '.join(f'{acc:.3f} on {split}' for split, acc in each.scores.items())}")
        if each.verdict:
            answer(f"  without labels: {each.verdict}")
    if there := [Path(each.folder) for each in found if each.folder]:
        answer("every bundle that is there can be served, the last one by:")
        show_next("export", shortened(there[-1]))
