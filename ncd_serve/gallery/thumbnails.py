"""Small pictures of the images, many in a sheet: browsers open hundreds of sheets more easily than 10,000 files."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image, ImageOps

from ncd_serve.errors import DataError
from ncd_serve.gallery.clusters import CENTRAL, DOUBTFUL
from ncd_serve.preprocess import open_image
from ncd_serve.rows.assignment import DECODERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ncd_serve.gallery.clusters import Cluster
    from ncd_serve.progress import Progress

COLUMNS = 10
_MAX_SHEET_IMAGES = 100
_FIRST_SHEET_IMAGES = CENTRAL + DOUBTFUL  # what a cluster is introduced by is one sheet, which comes first
_MAX_IMAGES_WITH_LARGE_TILES = 2000  # images that may be drawn larger
_LARGE_TILE, _SMALL_TILE = 128, 96  # px, whole blocks of JPEG: no picture bleeds into the next
_QUALITY = 75
_GREY = "#9a9a9a"


@dataclass(frozen=True)
class Sheet:
    """Thumbnails of consecutive images, as they are in the page."""

    first: bool  # of its cluster
    base64: str
    missing: list[int]  # images that could not be read, counted from the sheet's first


def tile_size(images: int) -> int:
    """Return width and height of the thumbnails in pixels."""
    return _LARGE_TILE if images <= _MAX_IMAGES_WITH_LARGE_TILES else _SMALL_TILE


class Part(NamedTuple):
    """Images of one sheet."""

    first: bool  # of its cluster
    rows: list[int]


def parts(clusters: Sequence[Cluster]) -> Iterator[Part]:
    """Yield the parts of clusters."""
    for cluster in clusters:
        yield Part(True, cluster.images[:_FIRST_SHEET_IMAGES])
        yield from more_parts(cluster.images[_FIRST_SHEET_IMAGES:])


def more_parts(rows: Sequence[int]) -> Iterator[Part]:
    """Yield the parts of images that introduce no cluster."""
    for start in range(0, len(rows), _MAX_SHEET_IMAGES):
        yield Part(False, [*rows[start : start + _MAX_SHEET_IMAGES]])


def make_sheets(files: Sequence[Path], wanted: Sequence[Part], *, size: int, progress: Progress) -> list[Sheet]:
    """Decode and shrink in threads, a sheet each."""
    with ThreadPoolExecutor(DECODERS) as pool:
        try:
            made = pool.map(partial(_make_sheet, files=files, size=size), wanted)
            return list(progress.track(made, "making thumbnails", len(wanted)))
        finally:
            pool.shutdown(cancel_futures=True)


def _make_sheet(part: Part, *, files: Sequence[Path], size: int) -> Sheet:
    content, missing = draw_sheet(part.rows, files=files, size=size)
    return Sheet(part.first, base64.b64encode(content).decode(), missing)


def draw_sheet(
    rows: Sequence[int], *, files: Sequence[Path], size: int, columns: int = COLUMNS
) -> tuple[bytes, list[int]]:
    """Return the sheet of these images as a JPEG file, and the numbers of those that could not be read."""
    sheet = Image.new("RGB", (size * columns, size * -(-len(rows) // columns)), _GREY)
    missing = []
    for number, row in enumerate(rows):
        try:
            tile = ImageOps.fit(open_image(files[row], at_least=size), (size, size), Image.Resampling.BILINEAR)
        except DataError:
            missing.append(number)
            continue
        sheet.paste(tile, (number % columns * size, number // columns * size))
    content = io.BytesIO()
    sheet.save(content, "JPEG", quality=_QUALITY)  # WebP saves a fifth and takes four times as long to open
    return content.getvalue(), missing
