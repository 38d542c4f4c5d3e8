"""`gallery`: a page to look at clusters and name them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import answer, messages
from ncd_serve.cli.options import note_newer_generation, run_or_newest
from ncd_serve.gallery.projection import MapKind
from ncd_serve.progress import Progress


def gallery(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|BUNDLE|ROWS",
            help="A finished run, a bundle, or rows of query or assign; default: the newest run.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="The page; default RUN/gallery.html, BUNDLE.gallery.html or ROWS.gallery.html."),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="The bundle that made the rows: its model draws the map, its names are kept.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of the images, if they were moved.")] = None,
    map_: Annotated[
        MapKind | None,
        typer.Option(
            "--map", help="Method of the map; default t-SNE if scikit-learn is installed, up to 5,000 images."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
) -> None:
    """Write a page of all clusters that opens offline: look at them, name them, merge them.

    Examples:
        ncd-serve gallery
        ncd-serve gallery runs/birds --title Birds
        ncd-serve gallery rows.csv --bundle runs/birds/bundle
    """
    from ncd_serve.gallery import make_gallery

    progress = Progress(messages)
    source = run_or_newest(source)
    made = make_gallery(source, output, bundle=bundle, images=images, title=title, kind=map_, progress=progress)
    gone = f" ({made.missing:,} could not be read)" if made.missing else ""
    size = made.path.stat().st_size / 1e6
    progress.say(f"{made.clusters:,} clusters, {made.images:,} images{gone}, {size:.1f} MB")
    answer(str(made.path))
    note_newer_generation(source)
    progress.say("next: open it in a browser, name the clusters, save names.json; ncd-serve name apply names.json")
