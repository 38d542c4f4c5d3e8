"""Latency of good images beside bad ones at the model for image files, and what they take of memory.

    .venv/bin/python benchmarks/hostile_serving.py [--quick]

ResNet-50 at 224 px with random weights, on this machine's CPU. One client sends a photograph after the other, alone and
beside four clients that send files which are made to cost much. Exit code 1 if a good request fails, or its p99 beside
files beyond the budget is more than five times that alone. The largest images within the budget are shown, too: those
are work like any other, and share the machine.
"""

from __future__ import annotations

import io
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tritonclient.grpc as grpc
from ncd_export.repository import add_to_repository
from PIL import Image
from rich.console import Console
from rich.table import Table
from serving import draw_photos, make_bundle

from ncd_serve.triton import TritonServer
from ncd_serve.triton.jpeg import jpeg_model_name

QUICK = "--quick" in sys.argv
REQUESTS, ATTACKERS, MOST = (50, 4, 5.0) if QUICK else (200, 4, 5.0)
READY_SECONDS = 120
MODEL = "ncd_global"
console = Console(width=110)


def blank(form: str, width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, form)
    return file.getvalue()


def wide_webp() -> bytes:
    """An animation of some hundred bytes with a canvas of a hundred million pixels."""
    file = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    data = bytearray(file.getvalue())
    data[24:27] = (2_482_432).to_bytes(3, "little")
    return bytes(data)


def odd_tiff() -> bytes:
    """A TIFF whose strips begin at a fraction of a byte."""
    data = bytearray(blank("TIFF", 40, 40))
    start = struct.unpack_from("<I", data, 4)[0]
    for entry in range(start + 2, start + 2 + 12 * struct.unpack_from("<H", data, start)[0], 12):
        if struct.unpack_from("<H", data, entry)[0] == 273:
            struct.pack_into("<HII", data, entry + 2, 5, 1, 0)
    return bytes(data)


def ask(client: grpc.InferenceServerClient, file: bytes) -> None:
    image = grpc.InferInput("image", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[file]], dtype=np.object_))
    client.infer(jpeg_model_name(MODEL), [image])


def measure(url: str, photos: list[bytes]) -> tuple[float, float, int]:
    """Return p50 and p99 in ms of requests one after the other, and how many failed."""
    times, failed = [], 0
    with grpc.InferenceServerClient(url) as client:
        for number in range(REQUESTS):
            start = time.perf_counter()
            try:
                ask(client, photos[number % len(photos)])
            except Exception:
                failed += 1
            times.append((time.perf_counter() - start) * 1000)
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99), failed


@contextmanager
def attack(url: str, file: bytes) -> Iterator[list[int]]:
    """Send a file again and again, from several clients; count the requests."""
    over, count = threading.Event(), [0]

    def send() -> None:
        with grpc.InferenceServerClient(url) as client:
            while not over.is_set():
                with suppress(Exception):
                    ask(client, file)
                count[0] += 1

    threads = [threading.Thread(target=send) for _ in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        yield count
    finally:
        over.set()
        for thread in threads:
            thread.join()


def memory_mib(leader: int) -> int:
    """Return what the processes of a group have taken at most, each at its own peak."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == leader:
                total += int((process / "status").read_text().split("VmHWM:")[1].split()[0]) // 1024
        except (OSError, IndexError):
            continue
    return total


def main() -> None:
    """Print all figures."""
    beyond = {
        "WebP, 2.5 million px wide": wide_webp(),
        "PNG, 9990 x 9990": blank("PNG", 9990, 9990),
        "TIFF that ends in a TypeError": odd_tiff(),
        "no image": b"no image",
    }
    within = {"PNG, 4600 x 4600, within the budget": blank("PNG", 4600, 4600)}
    table = Table("beside four clients that send", "p50 ms", "p99 ms", "x alone", "failed", "files sent")
    good = True
    with TemporaryDirectory() as name:
        folder = Path(name)
        add_to_repository(make_bundle(folder / "bundle", "resnet50"), folder / "models", name=MODEL)
        photos = [path.read_bytes() for path in draw_photos(folder / "photos", 32)]
        with TritonServer(folder / "models") as server:
            server.wait_ready(READY_SECONDS)
            measure(server.grpc_url, photos)
            p50, alone, failed = measure(server.grpc_url, photos)
            table.add_row("nothing", f"{p50:.0f}", f"{alone:.0f}", "", str(failed), "")
            for what, file in {**beyond, **within}.items():
                with attack(server.grpc_url, file) as count:
                    p50, p99, failed = measure(server.grpc_url, photos)
                figures = (f"{p50:.0f}", f"{p99:.0f}", f"{p99 / alone:.1f}", str(failed), f"{count[0]:,}")
                table.add_row(what, *figures)
                good &= failed == 0 and (what in within or p99 <= MOST * alone)
            console.print(table)
            console.print(f"all processes of the server, each at its peak: {memory_mib(server.pid):,} MiB")
    sys.exit(not good)


if __name__ == "__main__":
    main()
