"""Find the images that a user names: files, folders, patterns, archives, a list on stdin, URLs, images in memory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from glob import glob
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ncd_serve.errors import UsageError
from ncd_serve.inputs.archives import count_images, images_when_due, is_archive
from ncd_serve.inputs.download import fetch
from ncd_serve.inputs.images import InMemory, Source, find_images
from ncd_serve.text import printable

Word = str | Path | InMemory
Images = Word | Iterable[Word]
STDIN = "-"
_URL = re.compile(r"https?://", re.IGNORECASE)


class Sources(NamedTuple):
    """Images to process, and their number if it is known beforehand."""

    images: Iterator[Source]
    total: int | None


def find_sources(images: Images, *, allow_urls: bool = False) -> Sources:
    """Find images by files, folders, patterns, archives, URLs or in memory (PIL, or arrays uint8 [H, W, 3]), in order.

    Mistakes are raised at once, before any image is read. The path of a row is that of the file, `ARCHIVE/MEMBER`, the
    URL, or `image-0`, `image-1` and so on for images in memory.
    """
    numbers = count()
    return _joined(
        Sources(iter([Source.in_memory(image, next(numbers))]), 1)
        if isinstance(image, (Image.Image, np.ndarray))
        else _expand(image, allow_urls)
        for image in one_or_many(images)
    )


def one_or_many(images: Any) -> Iterable[Any]:
    """Return the images as a list; a single image becomes a list of one, an array [N, H, W, 3] a list of N."""
    if isinstance(images, (str, Path, Image.Image)) or (isinstance(images, np.ndarray) and images.ndim != 4):
        return [images]
    return images


def _expand(word: str | Path, allow_urls: bool) -> Sources:
    text = str(word)
    if text == STDIN:
        return Sources(_listed(allow_urls), None)
    if _URL.match(text):
        if not allow_urls:
            raise UsageError(f"{text} is a URL", hint="--allow-urls lets this command fetch images")
        return Sources(iter([_from_url(text)]), 1)
    return _joined(_below(path) for path in matching(text))


def _below(path: Path) -> Sources:
    """Return the images of a file, a folder or an archive."""
    if path.is_file() and is_archive(path):
        return Sources(images_when_due(path), count_images(path))
    files = find_images([path])
    return Sources(map(Source.of, files), len(files))


def _joined(parts: Iterable[Sources]) -> Sources:
    found = list(parts)
    totals = [part.total for part in found if part.total is not None]
    images = chain.from_iterable(part.images for part in found)
    return Sources(images, sum(totals) if len(totals) == len(found) else None)


def matching(word: str) -> list[Path]:
    """Return the paths that match a pattern; a word without matches is itself the path."""
    # What exists is meant as it is, also when its name looks like a pattern. Path.glob takes no absolute patterns.
    matches = [] if Path(word).exists() else sorted(glob(word, recursive=True))  # noqa: PTH207
    return [Path(match) for match in matches or [word]]


def listed() -> Iterator[str]:
    """Yield the non-empty lines of standard input."""
    for line in sys.stdin.buffer:
        if text := os.fsdecode(line.rstrip(b"\r\n")):
            yield text


def _listed(allow_urls: bool) -> Iterator[Source]:
    """Yield an image for each line of standard input; a line that names no image becomes a row with the reason."""
    for text in listed():
        if not _URL.match(text):
            yield Source.of(Path(text))
        else:
            yield _from_url(text) if allow_urls else Source.broken(printable(text), "a URL, but no --allow-urls")


def _from_url(url: str) -> Source:
    return Source(printable(url), partial(fetch, url))
