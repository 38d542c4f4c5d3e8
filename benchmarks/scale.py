"""Scaling with workers and images: Ray for bulk assignment, torchrun for training.

    .venv/bin/python benchmarks/scale.py [--quick]

ResNet-18 at 64 px with random weights, in blocks of 100 JPEG files; one core per worker. Starting Ray and loading
models is excluded: time runs from the fourth finished block to the last, and small jobs are the median of three runs.
Memory is the peak of a worker. The cost per image must stay within 10% while the work grows a hundredfold; exit code 1
otherwise. The upper bound for two workers is measured as well: two processes that share nothing but the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ncd_training.data.datasets.glyphs import write_glyphs
from PIL import Image
from rich.console import Console
from rich.table import Table
from serving import make_bundle

from ncd_serve.bundle import HASHED, MANIFEST, Bundle
from ncd_serve.files import sha256
from ncd_serve.preprocess import load_array
from ncd_serve.runners import OnnxRunner

QUICK = "--quick" in sys.argv
BASE, PICTURES, BLOCK, NOT_COUNTED, SIDE = 1000, 50, 100, 4, 64
REPEATS = {1: 3, 10: 1} if QUICK else {1: 3, 10: 1, 100: 1}
MOST_CHANGE = 0.10
EPOCHS = (1, 2)
ALONE_SECONDS, BATCH = 10, 10
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
console = Console(width=100)


def draw(folder: Path) -> list[Path]:
    """Draw noise that is as slow to decode as a photograph."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(PICTURES)]
    for path in paths:
        coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


class Peak:
    """Peak memory of Ray's workers in MB, measured while the context is open."""

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
    """Add the files and hashes that make a folder a bundle."""
    for name in HASHED:
        (bundle.folder / name).touch()
    hashes = {name: sha256(bundle.folder / name) for name in HASHED}
    content = bundle.manifest.model_copy(update={"sha256": hashes}).model_dump_json()
    (bundle.folder / MANIFEST).write_text(content)
    return bundle.folder


def assign(pictures: list[Path], images: int, bundle: Path, *, workers: int) -> tuple[float, float]:
    """Return milliseconds per image after start-up, and the peak memory of a worker in MB."""
    with TemporaryDirectory() as scratch, Peak() as peak:
        table, out = Path(scratch) / "paths.parquet", Path(scratch) / "rows"
        pq.write_table(pa.table({"path": [str(pictures[number % PICTURES]) for number in range(images)]}), table)
        command = [sys.executable, "-m", "ncd_serve", "assign", str(table), "--bundle", str(bundle), "--engine", "ray"]
        command += ["--workers", str(workers), "--block", str(BLOCK), "--out", str(out)]
        subprocess.run(command, check=True, env=ENVIRONMENT)
        ends = sorted(part.stat().st_mtime for part in out.glob("part-*.parquet"))
    counted = ends[NOT_COUNTED - 1 :]  # until then a worker may still have been loading its model
    return (counted[-1] - counted[0]) / (BLOCK * (len(counted) - 1)) * 1000, peak.megabytes


def sharing_nothing(bundle: Path, picture: Path, *, processes: int) -> float:
    """Return milliseconds per image of several processes at once, each of which assigns one image repeatedly."""
    command = [sys.executable, __file__, "--alone", str(bundle), str(picture)]
    running = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) for _ in range(processes)]
    return 1000 / sum(float(process.communicate()[0]) for process in running)


def images_a_second(bundle: Path, picture: Path) -> float:
    """Return the images per second of one process, after a second in which all have started."""
    runner = OnnxRunner(Bundle.read(bundle), threads=1)
    done, start = 0, time.monotonic() + 1
    while (now := time.monotonic()) < start + ALONE_SECONDS:
        runner.answer(np.stack([load_array(picture, runner.preprocess) for _ in range(BATCH)]))
        done += BATCH * (now >= start)
    return done / (now - start)


def train(data: Path, folder: Path, *, processes: int) -> float:
    """Return seconds per epoch of ResNet-18 without start and end: the difference of two runs with other epochs."""
    seconds = []
    for epochs in EPOCHS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "ncd_serve", "train", "--dataset", "glyphs", "--data-root", str(data)]
        command += ["--out", str(folder / f"{processes}-{epochs}")]
        for setting in (
            "rotations.epochs=0",
            "model.backbone=resnet18",
            "model.weights=none",
            f"data.resolution={SIDE}",
            f"data.resize={SIDE}",
        ):
            command += ["--set", setting]
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
        bundle, pictures = complete(make_bundle(folder / "bundle", "resnet18", SIDE)), draw(folder / "pictures")
        costs = []
        for times, repeats in REPEATS.items():
            runs = [assign(pictures, BASE * times, bundle, workers=2) for _ in range(repeats)]
            cost, memory = map(median, zip(*runs, strict=True))
            costs.append(cost)
            growth.add_row(f"{BASE * times:,}", "2", f"{cost:.2f}", f"{cost / costs[0]:.2f}", f"{memory:.0f}")
        alone, _ = assign(pictures, BASE * 10, bundle, workers=1)
        apart = [sharing_nothing(bundle, pictures[0], processes=processes) for processes in (1, 2)]
        epochs = [train(write_glyphs(folder / "glyphs", train=40), folder, processes=processes) for processes in (1, 2)]
    for what, (one, two) in {
        "sharing nothing, ms an image": apart,
        "Ray, ms an image": (alone, costs[1]),
        "torchrun, s an epoch": epochs,
    }.items():
        workers.add_row(what, f"{one:.2f}", f"{two:.2f}", f"{one / two:.2f}")
    console.print(growth, workers)
    sys.exit(any(abs(cost / costs[0] - 1) > MOST_CHANGE for cost in costs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        print(images_a_second(Path(sys.argv[2]), Path(sys.argv[3])))
    else:
        main()
