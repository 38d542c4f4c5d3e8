"""Make a page: read the source, draw the map, make thumbnails, write the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.bundle import MANIFEST
from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import atomic_path
from ncd_serve.gallery.clusters import describe_clusters
from ncd_serve.gallery.collection import Collection
from ncd_serve.gallery.page import Layout, page_data, write_page
from ncd_serve.gallery.projection import MapKind, choose_kind, places
from ncd_serve.gallery.read import read_source
from ncd_serve.gallery.thumbnails import make_sheets, tile_size
from ncd_serve.places import title_of
from ncd_serve.progress import SILENT, Progress

if TYPE_CHECKING:
    from ncd_serve.gallery.collection import Floats


@dataclass(frozen=True)
class Gallery:
    """A page that was written."""

    path: Path
    images: int
    clusters: int
    missing: int  # images whose files could not be read


def make_gallery(
    source: str | Path,
    out: str | Path | None = None,
    *,
    bundle: str | Path | None = None,
    images: str | Path | None = None,
    title: str | None = None,
    kind: MapKind | None = None,
    progress: Progress = SILENT,
) -> Gallery:
    """Write the page of a run, a bundle or rows; without `out` to its default place."""
    target = Path(out) if out else _default_page(Path(source))
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint=f"--out {target / 'gallery.html'}")
    shown = read_source(source, bundle=bundle, images=images, progress=progress)
    return build_gallery(shown, target, title=title, kind=kind, progress=progress)


def _default_page(source: Path) -> Path:
    """Return the default page: beside a rows file, inside a run, beside a bundle (whose files are fixed)."""
    if source.is_dir() and not (source / MANIFEST).is_file():
        return source / "gallery.html"
    whole = source.resolve()
    return whole.with_name(f"{whole.name}.gallery.html")


def build_gallery(
    shown: Collection,
    target: Path,
    *,
    title: str | None = None,
    kind: MapKind | None = None,
    progress: Progress = SILENT,
) -> Gallery:
    """Write the page of a collection, atomically."""
    layout = lay_out(shown, kind=kind, progress=progress)
    sheets = make_sheets(shown.pictures, layout.parts, size=tile_size(len(shown.paths)), progress=progress)
    missing = [start + number for start, sheet in zip(layout.starts, sheets, strict=False) for number in sheet.missing]
    data = page_data(shown, layout, missing=missing, title=title or title_of(shown.source))
    try:
        with atomic_path(target) as temporary, temporary.open("wb") as stream:
            write_page(data, sheets, stream)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror}", hint="check the folder and its space") from error
    return Gallery(target, len(shown.paths), len(layout.clusters), len(missing))


def lay_out(shown: Collection, *, kind: MapKind | None = None, progress: Progress = SILENT) -> Layout:
    """Describe the clusters of a collection, order its images, and place them on the map."""
    clusters, central = describe_clusters(shown)
    return Layout(clusters, central, *_draw_map(shown, kind, progress), left_out=len(shown.left_out))


def _draw_map(shown: Collection, kind: MapKind | None, progress: Progress) -> tuple[MapKind, Floats | None]:
    """Return the places of the images, followed by those of the background."""
    if shown.embeddings is None or kind is MapKind.NONE:
        return MapKind.NONE, None
    vectors = shown.embeddings if shown.background is None else np.concatenate([shown.embeddings, shown.background])
    chosen = kind or choose_kind(len(vectors))
    with progress.status(f"drawing the map ({chosen.value})"):
        return chosen, places(vectors, chosen)
