"""The only way from an image file to the array that a model is evaluated, verified and served with.

Training's evaluation, the export's verification, `assign` and `query` all call this; training's augmented views start
from `open_image` too. Normalisation is not here: it is inside the model.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict

from ncd_serve.errors import DataError

MAX_BYTES = 64 << 20
MAX_PIXELS = 100_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


class PreprocessSpec(BaseModel):
    """Shorter side to `resize` px (bilinear, antialiased), then the central square of `resolution` px."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    resolution: int
    resize: int


def open_image(source: Path | bytes | Image.Image, *, at_least: int = 0) -> Image.Image:
    """Decode an untrusted image file to upright RGB, or raise DataError with the reason.

    A JPEG may come out smaller than it is, but no side shorter than `at_least` (0: full size): decoding at a fraction
    of the size is several times faster than decoding all of it and shrinking afterwards.
    """
    try:
        image = source if isinstance(source, Image.Image) else _decoder(read_image(source))
        if image.width * image.height > MAX_PIXELS:
            raise DataError(f"{image.width} x {image.height} px are more than {MAX_PIXELS:,}")
        if at_least and image is not source:  # an image in memory is the caller's: it must not shrink
            image.draft("RGB", (at_least, at_least))
        return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise DataError("not an image of a known format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot be decoded: {error}") from error


def _decoder(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(data), formats=FORMATS)


def to_array(image: Image.Image, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Convert an RGB image to uint8 [resolution, resolution, 3]."""
    scale = spec.resize / min(image.size)
    size = (max(spec.resolution, round(image.width * scale)), max(spec.resolution, round(image.height * scale)))
    if size[0] * size[1] > MAX_PIXELS:  # its short side was so short that the long one grows beyond reason
        raise DataError(f"{image.width} x {image.height} px are too long and thin")
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - spec.resolution) // 2, (size[1] - spec.resolution) // 2
    return np.asarray(image.crop((left, top, left + spec.resolution, top + spec.resolution)))


def load_array(source: Path | bytes | Image.Image, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Load an image file or an image in memory as uint8 [resolution, resolution, 3]."""
    return to_array(open_image(source, at_least=spec.resize), spec)


def read_image(source: Path | bytes) -> bytes:
    """Return the bytes of an untrusted image file; raise DataError with the reason if it is unusable."""
    try:
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        if not 0 < size <= MAX_BYTES:
            raise DataError("the file is empty" if size == 0 else f"{size:,} bytes are more than {MAX_BYTES:,}")
        return source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from error
