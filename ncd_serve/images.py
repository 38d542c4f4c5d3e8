"""Which files are meant when a user names files and folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})


def find_images(sources: Iterable[Path]) -> list[Path]:
    """Files as named, and the images inside folders in sorted order; hidden files and folders are left out."""
    found: list[Path] = []
    for source in sources:
        if not source.exists():
            raise DataError(f"no such file or folder: {source}", hint="check the path")
        images = images_in(source) if source.is_dir() else [source]
        if not images:
            raise DataError(f"no images in {source}", hint=f"it needs files ending in {', '.join(sorted(SUFFIXES))}")
        found += images
    return found


def images_in(folder: Path) -> list[Path]:
    """All images below a folder, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
