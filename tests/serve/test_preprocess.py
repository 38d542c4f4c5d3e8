import io
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncd_serve import budget, preprocess
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


def tiff(*tags: tuple[int, int, int, int], data: bytes = bytes(400)) -> bytes:
    """Return a grey TIFF of 16 x 16 px; tags are (number, type, count, value) and replace the usual ones."""
    usual = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 200)]
    entries = {tag[0]: tag for tag in (*usual, (277, 3, 1, 1), (278, 4, 1, 16), *tags)}
    packed = b"".join(struct.pack("<HHII", *entries[number]) for number in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4) + data


def test_a_plain_tiff_is_decoded() -> None:
    assert load_array(tiff(), SPEC).shape == (32, 32, 3)


@pytest.mark.parametrize(
    "tag",
    [
        (277, 5, 1, 100),  # a fraction where Pillow expects a number: TypeError
        (273, 16, 1, 2**32 - 1),  # an offset beyond any file: OverflowError
        (262, 2, 4, 3),  # text
        (278, 12, 1, 100),
        (259, 3, 1, 32773),
        (330, 13, 1, 8),  # a directory that is its own child
    ],
)
def test_a_tag_of_another_type_is_an_error_of_that_image_alone(tag: tuple[int, int, int, int]) -> None:
    try:
        load_array(tiff(tag), SPEC)
    except DataError as error:
        assert str(error)


def test_any_failure_of_a_decoder_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for failure in (TypeError("odd"), OverflowError(), MemoryError(), struct.error("odd"), RecursionError()):
        monkeypatch.setattr(Image.Image, "load", lambda _, failure=failure: (_ for _ in ()).throw(failure))
        with pytest.raises(DataError, match=r"cannot be decoded: (odd|[A-Z][a-z]+)"):
            open_image(Image.new("RGB", (4, 4)))


BOMBS = {
    "WebP": lambda: encoded(Image.new("RGB", (8000, 8000)), "WEBP", lossless=True, method=0),
    "thin": lambda: encoded(Image.new("1", (65_000, 40))),
    "tile of a TIFF": lambda: tiff((259, 3, 1, 8), (322, 4, 1, 46_000), (323, 4, 1, 46_000), (324, 4, 1, 200)),
    "values of a tag": lambda: tiff((273, 4, 15_000_000, 134), data=bytes(60_000_000)),
    "sub-directory": lambda: tiff((34665, 4, 1, 122), data=struct.pack("<HHHII", 1, 37500, 4, 10**9, 8)),
    "slow PPM": lambda: b"P6\n3000 3000\n254\n" + bytes(27_000_000),
    "scans": lambda: scans(2000),
}


def scans(number: int) -> bytes:
    data = encoded(Image.new("RGB", (4000, 4000)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + data[-2:]


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_before_it_costs_anything(kind: str) -> None:
    data = BOMBS[kind]()
    start = time.thread_time()
    with pytest.raises(
        DataError, match=r"to decode, more than|too long and thin|values in a tag|of this kind|scans of"
    ):
        load_array(data, SPEC)
    assert time.thread_time() - start < 0.5


def test_decoding_ends_after_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "DECODING_SECONDS", 0.0)
    with pytest.raises(DataError, match="not decoded after 0 s"):
        open_image(encoded(Image.effect_noise((400, 400), 90)))


def test_of_an_animation_the_first_frame_counts() -> None:
    others = [Image.new("RGB", (50, 50), "white")] * 3
    for kind in ("GIF", "WEBP", "PNG"):
        data = encoded(Image.new("RGB", (50, 50), "black"), kind, save_all=True, append_images=others)
        assert load_array(data, SPEC).max() < 5, kind


def test_large_progressive_jpegs_count_with_all_their_coefficients() -> None:
    image, limits = Image.new("RGB", (4000, 3000)), []
    for options in ({}, {"progressive": True}):
        opened = Image.open(io.BytesIO(data := encoded(image, "JPEG", **options)))
        opened.draft("RGB", (40, 40))
        limits.append(budget._decoding_bytes(opened, data))
    assert limits[0] < 2_000_000 < 6 * 4000 * 3000 <= limits[1]


def test_large_images_wait_for_each_other_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    room = budget._Room(100)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with room.take(70):
            entered.set()
            leave.wait(10)

    def work(size: int) -> float:
        with room.take(size):
            return time.monotonic()

    with ThreadPoolExecutor(3) as pool:
        pool.submit(hold)
        assert entered.wait(10)
        large = pool.submit(work, 50)
        time.sleep(0.05)
        assert not large.done()
        monkeypatch.setattr(budget, "_large", room)
        assert load_array(encoded(Image.new("RGB", (50, 50))), SPEC).shape == (32, 32, 3)
        leave.set()
        assert large.result(10)


SIX_LARGE_ONES = """
import io
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from ncd_serve.memory import peak_memory
from ncd_serve.preprocess import PreprocessSpec, load_array
stream = io.BytesIO()
Image.new("L", (8000, 4000)).save(stream, "PNG", compress_level=1)
before, spec = peak_memory(), PreprocessSpec(resolution=32, resize=40)
with ThreadPoolExecutor(6) as pool:
    done = list(pool.map(lambda _: load_array(stream.getvalue(), spec).shape, range(6)))
print(len(done), peak_memory() - before)
"""


def test_all_decoders_of_a_process_share_one_budget() -> None:
    done = subprocess.run([sys.executable, "-c", SIX_LARGE_ONES], capture_output=True, text=True, check=True)
    images, used = map(int, done.stdout.split())
    assert images == 6 and used < budget.PROCESS_BYTES  # each takes 160 MB: six at once would take 960


def test_a_forked_process_has_a_budget_of_its_own() -> None:
    program = """
import os, sys
from ncd_serve import budget
with budget._large.take(budget.IMAGE_BYTES):
    child = os.fork()
    if not child:
        with budget._large.take(1):
            os._exit(7)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=20, check=False).returncode == 7
