import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncd_serve import preprocess
from ncd_serve.errors import DataError
from ncd_serve.preprocess import PreprocessSpec, load_array, open_image

SPEC = PreprocessSpec(resolution=32, resize=40)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("size", [(32, 32), (40, 40), (100, 50), (50, 300), (10, 8)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
def test_every_shape_and_mode_becomes_a_square_of_rgb(size: tuple[int, int], mode: str) -> None:
    array = load_array(encoded(Image.new(mode, size)), SPEC)
    assert array.shape == (32, 32, 3) and array.dtype == np.uint8


def test_the_middle_is_kept() -> None:
    image = Image.new("RGB", (120, 40), "black")
    image.paste("white", (40, 0, 80, 40))
    assert load_array(encoded(image), SPEC).min() == 255


def test_exif_rotation_is_obeyed() -> None:
    image = Image.new("RGB", (64, 64), "black")
    image.paste("white", (0, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to look at it
    array = load_array(encoded(image, "JPEG", exif=exif), SPEC)
    assert array[:, -4:].mean() > 250 and array[:, :4].mean() < 5


def test_a_large_jpeg_is_decoded_small_but_not_too_small() -> None:
    data = encoded(Image.new("RGB", (1600, 1200)), "JPEG")
    assert open_image(data).size == (1600, 1200)
    assert 100 <= min(open_image(data, at_least=100).size) < 400


def test_files_and_bytes_are_the_same(tmp_path: Path) -> None:
    data = encoded(Image.effect_noise((60, 50), 90).convert("RGB"), "JPEG")
    (tmp_path / "x.jpg").write_bytes(data)
    assert np.array_equal(load_array(data, SPEC), load_array(tmp_path / "x.jpg", SPEC))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello", "not an image"),
        (encoded(Image.new("RGB", (50, 50)))[:60], "cannot be decoded"),
        (encoded(Image.effect_noise((99, 99), 90), "JPEG")[:500], "cannot be decoded"),
    ],
)
def test_what_cannot_be_read_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        load_array(data, SPEC)


def test_limits_hold_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"px are more than|exceeds limit"):
        open_image(encoded(Image.new("1", (20_000, 20_000))))
    monkeypatch.setattr(preprocess, "MAX_BYTES", 10)
    with pytest.raises(DataError, match="bytes are more than"):
        open_image(b"x" * 11)


def test_a_thin_image_does_not_grow_beyond_reason() -> None:
    with pytest.raises(DataError, match="too long and thin"):
        load_array(encoded(Image.new("1", (1, 70_000))), SPEC)
    assert load_array(encoded(Image.new("1", (1, 1_000))), SPEC).shape == (32, 32, 3)


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        open_image(tmp_path / "none.png")
