"""From a collection to the file: facts, map, thumbnails, page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ncd_serve.files import atomic_path
from ncd_serve.gallery.clusters import describe
from ncd_serve.gallery.collection import Collection, Track, silent
from ncd_serve.gallery.page import page_data, write_page
from ncd_serve.gallery.places import MapKind, choose_kind, places
from ncd_serve.gallery.thumbnails import make_sheets, tile_size

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Gallery:
    """A page that was written."""

    path: Path
    images: int
    clusters: int
    missing: int  # images whose files could not be read


def build_gallery(
    shown: Collection, target: Path, *, title: str | None = None, kind: MapKind | None = None, track: Track = silent
) -> Gallery:
    """Write the page of a collection, atomically."""
    clusters, central = describe(shown)
    if shown.embeddings is None or kind is MapKind.NONE:
        kind, where = MapKind.NONE, None
    else:
        kind = kind or choose_kind(len(shown.paths))
        (where,) = track((places(shown.embeddings, kind) for _ in range(1)), f"drawing the map ({kind.value})", 1)
    size = tile_size(len(shown.paths))
    sheets = make_sheets(shown.files, clusters, size=size, track=track)
    data = page_data(
        shown, clusters, central, sheets=sheets, tile=size, title=title or shown.source.name, kind=kind, where=where
    )
    with atomic_path(target) as temporary, temporary.open("wb") as stream:
        write_page(data, sheets, stream)
    return Gallery(target, len(shown.paths), len(clusters), sum(len(sheet.missing) for sheet in sheets))
