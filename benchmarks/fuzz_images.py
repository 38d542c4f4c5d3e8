"""Decode mutated images of every format: each becomes pixels or a DataError, in bounded memory.

    .venv/bin/python benchmarks/fuzz_images.py [--images 20000] [--seed 0]

Originals of all formats, modes and compressions are changed at random: bytes, numbers in headers, lengths, tags of
TIFF and EXIF with other types, counts and values. They are decoded by four threads under a limit of address space.
Prints the outcomes, the slowest image and the peak memory. Exit code 1 if another error than DataError came out.
"""

from __future__ import annotations

import argparse
import io
import random
import resource
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from PIL import Image

from ncd_serve.budget import PROCESS_BYTES
from ncd_serve.errors import DataError
from ncd_serve.memory import peak_memory
from ncd_serve.preprocess import PreprocessSpec, load_array

SPEC = PreprocessSpec(resolution=64, resize=72)
LIMIT_BYTES = 4 << 30  # of address space, of which Python and its libraries take more than half a gigabyte
THREADS = 4
# Sizes that ask for much, and values at the edges of their types.
NUMBERS = (0, 1, 2, 255, 256, 4096, 32767, 32768, 65535, 65536, 9_999, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1, 10**8)
TIFF_TYPES = range(19)


class Outcome(NamedTuple):
    """Outcome of one image."""

    kind: str
    what: str
    seconds: float


def originals() -> dict[str, bytes]:
    """Return small images of every format, mode and compression that is read."""
    noise = Image.effect_noise((48, 40), 80)
    exif = Image.Exif()
    exif[0x0112] = 6
    found = {}
    for mode in ("RGB", "RGBA", "L", "P", "1", "I;16", "LA", "CMYK", "F"):
        for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"):
            for name, options in _options(kind, exif):
                stream = io.BytesIO()
                try:
                    noise.convert(mode).save(stream, kind, **options)
                except (OSError, ValueError, KeyError):
                    continue  # the format has no such mode
                found[f"{kind} {mode} {name}"] = stream.getvalue()
    return found


def _options(kind: str, exif: Image.Exif) -> list[tuple[str, dict[str, object]]]:
    frames = [Image.effect_noise((48, 40), 40).convert("RGB") for _ in range(2)]
    animated: dict[str, object] = {"save_all": True, "append_images": frames}
    table: dict[str, list[tuple[str, dict[str, object]]]] = {
        "PNG": [("", {}), ("exif", {"exif": exif}), ("animated", animated)],
        "JPEG": [("", {}), ("exif", {"exif": exif}), ("progressive", {"progressive": True})],
        "WEBP": [("", {}), ("lossless", {"lossless": True, "exif": exif}), ("animated", animated)],
        "GIF": [("", {}), ("animated", animated)],
        "TIFF": [
            (name, {"compression": name, "exif": exif})
            for name in ("raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg", "group4", "zstd", "lzma", "webp")
        ],
    }
    return table.get(kind, [("", {})])


def mutated(data: bytes, choose: random.Random) -> bytes:
    """Return the image with one to four changes."""
    changed = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        if bytes(changed[:2]) in (b"II", b"MM") and choose.random() < 0.7:
            _retype_tag(changed, choose)
        else:
            choose.choice((_set_byte, _set_number, _cut, _repeat))(changed, choose)
    return bytes(changed)


def _set_byte(data: bytearray, choose: random.Random) -> None:
    if data:
        data[choose.randrange(len(data))] = choose.randrange(256)


def _set_number(data: bytearray, choose: random.Random) -> None:
    """Write an odd number, mostly into the header."""
    form = choose.choice(("<H", ">H", "<I", ">I"))
    size = struct.calcsize(form)
    if len(data) > size:
        at = choose.randrange(min(len(data) - size, choose.choice((64, 512, 1 << 20))))
        struct.pack_into(form, data, at, choose.choice(NUMBERS) % 256**size)


def _cut(data: bytearray, choose: random.Random) -> None:
    del data[choose.randrange(len(data) + 1) :]


def _repeat(data: bytearray, choose: random.Random) -> None:
    start = choose.randrange(len(data) + 1)
    data[start:start] = data[start : start + choose.randrange(200)] * choose.randrange(1, 20)


def _retype_tag(data: bytearray, choose: random.Random) -> None:
    """Give a tag of the first directory of a TIFF another number, type, count or value."""
    order = "<" if data[:2] == b"II" else ">"
    if len(data) < 8:
        return
    (first,) = struct.unpack_from(order + "I", data, 4)
    if first + 14 > len(data):
        return
    (tags,) = struct.unpack_from(order + "H", data, first)
    at = first + 2 + 12 * choose.randrange(max(1, tags))
    if at + 12 > len(data):
        return
    tag, kind, count, value = struct.unpack_from(order + "HHII", data, at)
    if choose.random() < 0.1:
        tag = choose.choice((256, 257, 258, 262, 273, 277, 278, 279, 322, 323, 324, 325, 330, 339, 34665))
    if choose.random() < 0.5:
        kind = choose.choice(TIFF_TYPES)
    if choose.random() < 0.3:
        count = choose.choice(NUMBERS) % 2**32
    if choose.random() < 0.3:
        value = choose.choice(NUMBERS) % 2**32
    struct.pack_into(order + "HHII", data, at, tag, kind, count, value)


def mutants(number: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield mutated images, of all originals in turn; each depends on the seed and its own number alone."""
    sources = list(originals().items())
    for index in range(number):
        name, data = sources[index % len(sources)]
        yield f"{index} ({name})", mutated(data, random.Random(f"{seed} {index}"))


def try_decoding(image: tuple[str, bytes]) -> Outcome:
    name, data = image
    start = time.thread_time()
    try:
        array = load_array(data, SPEC)
        kind, what = ("decoded", name) if array.shape == (64, 64, 3) else ("uncaught", f"{name}: {array.shape}")
    except DataError:
        kind, what = "refused", name
    except BaseException:
        kind, what = "uncaught", f"{name}: {traceback.format_exc()}"
    return Outcome(kind, what, time.thread_time() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    images = list(mutants(arguments.images, arguments.seed))
    before = peak_memory()
    with ThreadPoolExecutor(THREADS) as pool:
        outcomes = list(pool.map(try_decoding, images))
    counts = Counter(outcome.kind for outcome in outcomes)
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    print(f"{len(outcomes):,} images: {counts['decoded']:,} decoded, {counts['refused']:,} refused, ", end="")
    print(f"{counts['uncaught']:,} uncaught")
    print(f"slowest: {slowest.seconds:.2f} s, image {slowest.what}")
    peak = (peak_memory() - before) >> 20
    print(f"memory of decoding: {peak:,} MiB at the peak, of a budget of {PROCESS_BYTES >> 20:,} MiB")
    for outcome in outcomes:
        if outcome.kind == "uncaught":
            print(outcome.what, file=sys.stderr)
    return 1 if counts["uncaught"] else 0


if __name__ == "__main__":
    sys.exit(main())
