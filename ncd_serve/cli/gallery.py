"""`gallery`: a page to look at clusters and name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ncd_serve.cli.console import messages, out
from ncd_serve.errors import UsageError
from ncd_serve.gallery.projection import MapKind


def gallery(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|BUNDLE|ROWS", help="A finished run, a bundle, or rows of query or assign.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--out", help="The page; default RUN/gallery.html, BUNDLE.gallery.html or ROWS.gallery.html."),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="The bundle that made the rows: its model draws the map, its names are kept.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Where the images are now, if they were moved.")] = None,
    map_: Annotated[
        MapKind | None,
        typer.Option("--map", help="How to draw the map; default t-SNE where scikit-learn is, up to 5,000 images."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="What the page is called.")] = None,
) -> None:
    """Write a page of all clusters that opens offline: look at them, name them, merge them."""
    from ncd_serve.gallery import build_gallery, read_source

    target = output or _default(source)
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint=f"--out {target / 'gallery.html'}")
    shown = read_source(source, bundle=bundle, images=images, track=_track)
    made = build_gallery(shown, target, title=title, kind=map_, track=_track)
    gone = f" ({made.missing:,} could not be read)" if made.missing else ""
    size = target.stat().st_size / 1e6
    messages.print(
        f"{made.clusters:,} clusters, {made.images:,} images{gone}, {size:.1f} MB", highlight=False, soft_wrap=True
    )
    out.print(str(target), markup=False, highlight=False, soft_wrap=True)


def _default(source: Path) -> Path:
    """Beside a file, inside a run, and beside a bundle, whose files are counted."""
    from ncd_serve.bundle import MANIFEST

    if source.is_dir() and not (source / MANIFEST).is_file():
        return source / "gallery.html"
    whole = source.resolve()
    return whole.with_name(f"{whole.name}.gallery.html")


def _track(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
    from rich.progress import track

    yield from track(items, description, total, console=messages, transient=True, disable=not messages.is_terminal)
