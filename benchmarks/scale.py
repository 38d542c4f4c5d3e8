"""What more workers give and more images cost: Ray for bulk assignment, torchrun for training.

    .venv/bin/python benchmarks/scale.py [--quick]

ResNet-18 at 224 px with random weights on JPEG files; a core for each worker. Starting Ray and loading models is not
counted: time runs from the first finished block to the last. Memory is the most that a worker held. The cost of an
image must stay within 10% while the work grows a hundredfold; exit code 1 otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ncd_training.glyphs import write_glyphs
from PIL import Image
from rich.console import Console
from rich.table import Table
from serving import make_bundle

from ncd_serve.bundle import HASHED, MANIFEST, Bundle
from ncd_serve.files import sha256

QUICK = "--quick" in sys.argv
BASE, PICTURES = (60, 20) if QUICK else (100, 50)
GROWTH = (1, 10) if QUICK else (1, 10, 100)
MOST_CHANGE = 0.10
EPOCHS = (1, 2) if QUICK else (1, 4)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
console = Console(width=100)


def draw(folder: Path) -> list[Path]:
    """Noise that is as hard to decode as a photograph."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(PICTURES)]
    for path in paths:
        coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


class Peak:
    """The most memory that any of Ray's workers holds while this is open, in MB."""

    def __enter__(self) -> Peak:
        self.megabytes, self._ended = 0.0, Event()
        self._thread = Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            listed = subprocess.run(["ps", "-eo", "rss,args"], capture_output=True, text=True, check=True).stdout
            sizes = [int(line.split()[0]) for line in listed.splitlines()[1:] if "ray::" in line and "Worker" in line]
            self.megabytes = max([self.megabytes, *(size / 1024 for size in sizes)])


def complete(bundle: Bundle) -> Path:
    """With the files and hashes that a bundle is known by."""
    for name in HASHED:
        (bundle.folder / name).touch()
    hashes = {name: sha256(bundle.folder / name) for name in HASHED}
    content = bundle.manifest.model_copy(update={"sha256": hashes}).model_dump_json()
    (bundle.folder / MANIFEST).write_text(content)
    return bundle.folder


def assign(pictures: list[Path], images: int, bundle: Path, folder: Path, *, workers: int) -> tuple[float, float]:
    """Milliseconds an image once the workers work, and a worker's memory in MB."""
    paths = [str(pictures[number % len(pictures)]) for number in range(images)]
    block, table, out = max(10, images // 40), folder / f"{images}-{workers}.parquet", folder / f"{images}-{workers}"
    pq.write_table(pa.table({"path": paths}), table, row_group_size=block)
    command = [sys.executable, "-m", "ncd_serve", "assign", str(table), "--bundle", str(bundle), "--engine", "ray"]
    with Peak() as peak:
        subprocess.run([*command, "--workers", str(workers), "--out", str(out)], check=True, env=ENVIRONMENT)
    ends = sorted(part.stat().st_mtime for part in out.glob("part-*.parquet"))
    counted = ends[workers - 1 :]  # the first block of each worker waits for its model
    return (counted[-1] - counted[0]) / (block * (len(counted) - 1)) * 1000, peak.megabytes


def train(data: Path, folder: Path, *, processes: int) -> float:
    """Seconds an epoch, start and end not counted: two runs differ by their epochs alone."""
    seconds = []
    for epochs in EPOCHS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "ncd_serve", "train", "--dataset", "glyphs", "--data-root", str(data)]
        command += ["--out", str(folder / f"{processes}-{epochs}"), "--set", "rotations.epochs=0"]
        command += ["--set", f"optim.epochs={epochs}", "--set", "data.cache_views=0", "--set", "data.workers=0"]
        start = time.perf_counter()
        subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (EPOCHS[1] - EPOCHS[0])


def main() -> None:
    growth = Table("images", "workers", "ms an image", "of the first", "MB a worker", title="Ray, work that grows")
    workers = Table("", "one", "two", "times as fast", title="two workers against one, 2 cores")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bundle, pictures = complete(make_bundle(folder / "bundle", "resnet18")), draw(folder / "pictures")
        costs = []
        for times in GROWTH:
            cost, memory = assign(pictures, BASE * times, bundle, folder, workers=2)
            costs.append(cost)
            cells = f"{cost:.2f}", f"{cost / costs[0]:.2f}", f"{memory:.0f}"
            growth.add_row(f"{BASE * times:,}", "2", *cells)
        alone, _ = assign(pictures, BASE * GROWTH[1], bundle, folder, workers=1)
        workers.add_row("Ray, ms an image", f"{alone:.2f}", f"{costs[1]:.2f}", f"{alone / costs[1]:.2f}")
        data = write_glyphs(folder / "glyphs")
        one, two = (train(data, folder, processes=processes) for processes in (1, 2))
        workers.add_row("torchrun, s an epoch", f"{one:.1f}", f"{two:.1f}", f"{one / two:.2f}")
    console.print(growth, workers)
    sys.exit(max(costs) / costs[0] > 1 + MOST_CHANGE)


if __name__ == "__main__":
    main()
