"""The only way from an image file to the array that a model is evaluated, verified and served with.

Training's evaluation, the export's verification, `assign` and `query` all call this; training's augmented views start
from `open_image` too. Normalisation is not here: it is inside the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field

from ncd_serve.budget import MAX_PIXELS, TimedBytes, check_size, check_tags, room_for
from ncd_serve.errors import DataError

MAX_BYTES = 64 << 20
MAX_EXIF_BYTES = 1 << 20
MAX_SIDE = 4096  # px, of what a model takes
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# What turns an image upright, by its EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PreprocessSpec(BaseModel):
    """Shorter side to `resize` px (antialiased), then the central square of `resolution` px."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resolution: int = Field(ge=1, le=MAX_SIDE)
    resize: int = Field(ge=1, le=MAX_SIDE)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"


def open_image(source: Path | bytes | Image.Image, *, at_least: int = 0) -> Image.Image:
    """Decode an untrusted image file to upright RGB, or raise DataError with the reason, whatever is wrong with it.

    A JPEG may come out smaller than it is, but no side shorter than `at_least` (0: full size): decoding at a fraction
    of the size is several times faster than decoding all of it and shrinking afterwards. Of an animation, the first
    frame is decoded. Memory and time are limited by the `budget` of this process.
    """
    with _decoded(source, at_least) as image:
        return image


@contextmanager
def _decoded(source: Path | bytes | Image.Image, at_least: int) -> Iterator[Image.Image]:
    """Yield the decoded image; its memory is part of the budget until the block ends."""
    try:
        if isinstance(source, Image.Image):
            check_size(source)
            yield _upright_rgb(source)
            return
        data = read_image(source)
        check_tags(data)
        with _without_warnings(), Image.open(TimedBytes(data), formats=FORMATS) as image:
            check_size(image)
            if at_least:
                image.draft("RGB", (at_least, at_least))
            with room_for(image, data, side=at_least):
                yield _upright_rgb(image)
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError("not an image of a known format") from None
    except Exception as error:  # decoders raise anything: TypeError, OverflowError, MemoryError, struct.error
        raise DataError(f"cannot be decoded: {str(error) or type(error).__name__}") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore Pillow's warnings about metadata and sizes: a user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if len(image.info.get("exif", b"")) > MAX_EXIF_BYTES:
        raise DataError(f"more than {MAX_EXIF_BYTES:,} bytes of EXIF data")
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    turned = image if turn is None else image.transpose(turn)
    # A copy, which survives the file that it was read from, or the caller's own image.
    return turned.copy() if turned.mode == "RGB" and turned is image else turned.convert("RGB")


def to_array(image: Image.Image, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Convert an RGB image to uint8 [resolution, resolution, 3]."""
    scale = spec.resize / min(image.size)
    size = (max(spec.resolution, round(image.width * scale)), max(spec.resolution, round(image.height * scale)))
    if size[0] * size[1] > MAX_PIXELS:  # its short side was so short that the long one grows beyond reason
        raise DataError(f"{image.width} x {image.height} px are too long and thin")
    if size != image.size:
        image = image.resize(size, Image.Resampling[spec.interpolation.upper()])
    left, top = (size[0] - spec.resolution) // 2, (size[1] - spec.resolution) // 2
    return np.asarray(image.crop((left, top, left + spec.resolution, top + spec.resolution)))


def load_array(source: Path | bytes | Image.Image, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Load an image file or an image in memory as uint8 [resolution, resolution, 3]."""
    with _decoded(source, spec.resize) as image:
        array = to_array(image, spec)
        image.close()  # before another one takes its place in memory
        return array


def read_image(source: Path | bytes) -> bytes:
    """Return the bytes of an untrusted image file; raise DataError with the reason if it is unusable."""
    try:
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        if not 0 < size <= MAX_BYTES:
            raise DataError("the file is empty" if size == 0 else f"{size:,} bytes are more than {MAX_BYTES:,}")
        return source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from error
