"""From a collection to the file: facts, map, thumbnails, page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path
from ncd_serve.gallery.clusters import describe
from ncd_serve.gallery.collection import Collection, Track, silent
from ncd_serve.gallery.page import page_data, write_page
from ncd_serve.gallery.projection import MapKind, choose_kind, places
from ncd_serve.gallery.thumbnails import make_sheets, tile_size

if TYPE_CHECKING:
    from pathlib import Path

    from ncd_serve.gallery.collection import Floats


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
    kind, where = _draw_map(shown, kind, track)
    size = tile_size(len(shown.paths))
    sheets = make_sheets(shown.files, clusters, size=size, track=track)
    data = page_data(
        shown, clusters, central, sheets=sheets, tile=size, title=title or shown.source.name, kind=kind, where=where
    )
    try:
        with atomic_path(target) as temporary, temporary.open("wb") as stream:
            write_page(data, sheets, stream)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror}", hint="check the folder and its space") from error
    return Gallery(target, len(shown.paths), len(clusters), sum(len(sheet.missing) for sheet in sheets))


def _draw_map(shown: Collection, kind: MapKind | None, track: Track) -> tuple[MapKind, Floats | None]:
    """Places of the images and, after them, of the background."""
    if shown.embeddings is None or kind is MapKind.NONE:
        return MapKind.NONE, None
    vectors = shown.embeddings if shown.background is None else np.concatenate([shown.embeddings, shown.background])
    chosen = kind or choose_kind(len(vectors))
    (where,) = track((places(vectors, chosen) for _ in range(1)), f"drawing the map ({chosen.value})", 1)
    return chosen, where
