"""Images that a user names: files, images in folders, and images in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ncd_serve.errors import DataError, UsageError
from ncd_serve.text import printable

InMemory = Image.Image | NDArray[np.uint8]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})


class Source(NamedTuple):
    """One image: the path of its row, and a function that returns its file, bytes or pixels, or raises DataError."""

    path: str
    read: Callable[[], Path | bytes | Image.Image]

    @classmethod
    def of(cls, path: str | Path) -> Source:
        """Return the image in a file on disk."""
        return cls(printable(path), lambda: Path(path))

    @classmethod
    def in_memory(cls, image: InMemory, number: int) -> Source:
        """Return an image without a file: a PIL image or an array uint8 [H, W, 3]; its row has the path `image-NUMBER`.

        It is used in full size. Large JPEG files are decoded at a fraction of it, so their pixels differ a little.
        """
        held = image if isinstance(image, Image.Image) else _from_array(image)
        return cls(f"image-{number}", lambda: held)

    @classmethod
    def broken(cls, path: str, reason: str) -> Source:
        """Return an image that cannot be read, with the reason."""

        def read() -> bytes:
            raise DataError(reason)

        return cls(path, read)


def _from_array(array: NDArray[Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise UsageError(
            f"an image in memory is uint8 [height, width, 3], not {array.dtype} {list(array.shape)}",
            hint="convert it, for example: (255 * array).round().astype('uint8')",
        )
    return Image.fromarray(array)


def find_images(sources: Iterable[Path]) -> list[Path]:
    """Return files as named, and the images in folders in sorted order; hidden files and folders are skipped."""
    found: list[Path] = []
    for source in sources:
        if not source.exists():
            raise DataError(f"no such file or folder: {source}", hint="check the path")
        images = images_in(source) if source.is_dir() else [source]
        if not images:
            raise no_images(source)
        found += images
    return found


def no_images(source: object) -> DataError:
    """Return the error for a folder or an archive without images."""
    return DataError(f"no images in {source}", hint=f"it needs files ending in {', '.join(sorted(SUFFIXES))}")


def images_in(folder: Path) -> list[Path]:
    """Return all images below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if is_image(path.relative_to(folder)) and path.is_file())


def is_image(path: PurePath) -> bool:
    """Return whether a file is an image, by its name below the folder that was named; hidden ones are not."""
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.parts)
