"""Budget of decoders: bytes and seconds for each image, and bytes for all images that a process decodes at once.

A file of two kilobytes may ask for gigabytes. What decoding takes is therefore estimated from the header, and an image
is refused, or waits until others are done, before its pixels are touched.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Lock
from typing import Any

from PIL import Image

from ncd_serve.errors import DataError

MAX_PIXELS = 100_000_000
MAX_ASPECT = 1000  # the longer side over the shorter one
IMAGE_BYTES = 512 << 20  # of one image, and of all large ones together
SMALL_IMAGE_BYTES, SMALL_IMAGES_BYTES = 16 << 20, 128 << 20  # of one small image, and of all of them together
PROCESS_BYTES = IMAGE_BYTES + SMALL_IMAGES_BYTES  # what decoding takes of a process at most
DECODING_SECONDS = 5.0  # of one core; each limit below keeps what cannot be interrupted under two or three
_MAX_SCANNED_PIXELS = 1_500_000_000  # of a JPEG: usual ones have ten scans, each of them a pass over all pixels
_SLOW_CODECS, _MAX_SLOW_PIXELS = ("ppm", "ppm_plain", "bmp_rle"), 4_000_000  # Pillow has them in Python
_MAX_TAG_VALUES = 1 << 17  # of a TIFF: rows or tiles of the largest image; Python needs 40 bytes for each
_BYTE_TYPES = (1, 2, 7)  # of TIFF tags whose values stay bytes
_SUB_DIRECTORIES = (34665, 34853, 40965)  # EXIF, GPS, interoperability
_BITS, _SAMPLES, _ROWS_PER_STRIP, _TILE_WIDTH, _TILE_LENGTH = 258, 277, 278, 322, 323
# Bytes a pixel: what Pillow stores, and a copy that is turned upright or converted to RGB.
_STORED_BYTES = {"1": 1, "L": 1, "P": 1, "LA": 4, "I;16": 2, "I;16L": 2, "I;16B": 2}
_COPY_BYTES = 5
_WEBP_BYTES = 17  # two canvases of an animation, which every WebP is to libwebp, the frame, and the image
_START_OF_JPEG, _START_OF_SCAN = b"\xff\xd8", b"\xff\xda"
# Byte order, and whether it is a BigTIFF.
_TIFF_STARTS = {
    b"II*\0": ("<", False),
    b"MM\0*": (">", False),
    b"MM*\0": (">", False),
    b"II\0*": ("<", False),
    b"II+\0": ("<", True),
    b"MM\0+": (">", True),
}
_COEFFICIENT_BYTES = 2  # a pixel and channel of a JPEG that has several scans, whatever the size it is decoded to


class _Room:
    """Bytes that several threads share."""

    def __init__(self, size: int) -> None:
        self._free, self._freed, self._door = size, Condition(), Lock()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Wait until so many bytes are free, behind all who came before, and keep them for the block."""
        with self._door, self._freed:
            self._freed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._freed:
                self._free += size
                self._freed.notify_all()


# Small images never wait for large ones.
_large, _small = _Room(IMAGE_BYTES), _Room(SMALL_IMAGES_BYTES)


def _empty_rooms() -> None:
    """Start anew in a forked process, which decodes nothing yet, whatever threads of its parent were doing."""
    global _large, _small
    _large, _small = _Room(IMAGE_BYTES), _Room(SMALL_IMAGES_BYTES)


os.register_at_fork(after_in_child=_empty_rooms)


class TimedBytes(io.BytesIO):
    """Bytes of a file whose reading raises DataError when decoding has taken too long. Decoders read in small pieces.

    WebP and compressed TIFF are decoded in one piece: their time is bounded by the number of pixels.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._end = time.thread_time() + DECODING_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        """Read like any file."""
        if time.thread_time() > self._end:
            raise DataError(f"not decoded after {DECODING_SECONDS:g} s")
        return super().read(size)


@contextmanager
def room_for(image: Image.Image, data: bytes, *, side: int) -> Iterator[None]:
    """Keep the memory that decoding an opened file takes, with its shorter side scaled to `side`; wait if need be.

    Raises DataError for an image that would take more memory than one image may.
    """
    size = _decoding_bytes(image, data) + _scaled_bytes(image, side)
    if size > IMAGE_BYTES:
        what = f"{image.width} x {image.height} px as {image.format}"
        raise DataError(f"{what} take {size >> 20:,} MiB to decode, more than {IMAGE_BYTES >> 20}")
    if size <= SMALL_IMAGE_BYTES:
        with _small.take(size):
            yield
        return
    with _large.take(size):
        try:
            yield
        finally:
            image.close()
            _give_memory_back()


def _give_memory_back() -> None:
    """Let the system have what was freed: glibc would keep hundreds of megabytes for each thread that decoded."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def check_size(image: Image.Image) -> None:
    """Raise DataError for an image with too many pixels, or one that is so thin that scaling it makes many."""
    if image.width * image.height > MAX_PIXELS:
        raise DataError(f"{image.width} x {image.height} px are more than {MAX_PIXELS:,}")
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise DataError(f"{image.width} x {image.height} px are too long and thin")
    if image.width * image.height > _MAX_SLOW_PIXELS and any(tile[0] in _SLOW_CODECS for tile in _tiles(image)):
        raise DataError(f"{image.width} x {image.height} px are more than {_MAX_SLOW_PIXELS:,} of this kind")


def _tiles(image: Any) -> Any:
    """Return the pieces that a file is decoded in; an image in memory has none."""
    return getattr(image, "tile", ())


def _decoding_bytes(image: Image.Image, data: bytes) -> int:
    pixels = image.width * image.height
    if image.format == "WEBP":
        return _WEBP_BYTES * pixels
    extra = _piece_bytes(image) if image.format == "TIFF" else _coefficient_bytes(image, data)
    return (_STORED_BYTES.get(image.mode, 4) + _COPY_BYTES) * pixels + extra


def _scaled_bytes(image: Image.Image, side: int) -> int:
    """Return the bytes of the scaled image, which is made in two passes."""
    return 2 * 4 * side * side * max(image.size) // min(image.size)


def _coefficient_bytes(image: Any, data: bytes) -> int:
    """Return the bytes of a JPEG's coefficients, which are all kept if they come in several scans."""
    if image.format not in ("JPEG", "MPO"):
        return 0
    if not image.info.get("progressive") and _channels_of_first_scan(data) == image.layers:
        return 0
    scale = image.decoderconfig[0] if image.decoderconfig else 1
    pixels = image.width * image.height * scale * scale
    if (scans := data.count(_START_OF_SCAN)) * pixels > _MAX_SCANNED_PIXELS:
        raise DataError(f"{scans} scans of {pixels:,} px are too many")
    return int(_COEFFICIENT_BYTES * image.layers * pixels)


def _channels_of_first_scan(data: bytes) -> int:
    """Return the number of channels in the first scan of a JPEG; 0 for one with unusual segments before it."""
    at = len(_START_OF_JPEG)
    while data[at : at + 1] == b"\xff" and len(data) > at + 4:
        if data[at : at + 2] == _START_OF_SCAN:
            return data[at + 4]
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0


def _piece_bytes(image: Any) -> int:
    """Return the bytes of a strip or tile of a TIFF, which is unpacked at once and may be larger than the image."""
    tags = image.tag_v2
    if _tiles(image)[0][0] != "libtiff":
        return 0
    if _TILE_WIDTH in tags:
        pixels = tags[_TILE_WIDTH] * tags[_TILE_LENGTH]
    else:
        pixels = max(image.size) * min(tags.get(_ROWS_PER_STRIP, MAX_PIXELS), max(image.size))
    channel_bytes = -(-max(tags.get(_BITS, (8,))) // 8)
    return int(pixels * (tags.get(_SAMPLES, 1) * channel_bytes + 4))  # and four, where libtiff converts to RGBA


def check_tags(data: bytes) -> None:
    """Raise DataError for a TIFF with more values than Python can unpack in bounded memory; other files pass."""
    order, big = _TIFF_STARTS.get(data[:4], ("", False))
    if not order:
        return
    entry = struct.Struct(order + ("HHQQ" if big else "HHII"))
    number = struct.Struct(order + ("Q" if big else "H"))
    (first,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    waiting, seen = [first], set[int]()
    while waiting and (at := waiting.pop()) + number.size <= len(data) and at not in seen:
        seen.add(at)
        start, entries = at + number.size, number.unpack_from(data, at)[0]
        for tag, kind, count, value in entry.iter_unpack(
            _whole(data[start : start + entries * entry.size], entry.size)
        ):
            if count > _MAX_TAG_VALUES and kind not in _BYTE_TYPES:
                raise DataError(f"{count:,} values in a tag are more than {_MAX_TAG_VALUES:,}")
            if tag in _SUB_DIRECTORIES:
                waiting.append(value)


def _whole(data: bytes, size: int) -> bytes:
    return data[: len(data) // size * size]
