"""Cost of serving: Triton against ONNX Runtime in the same process, `query` against decoding and model only.

    .venv/bin/python benchmarks/serving.py [--quick]

ResNet-50 at 224 px with random weights, on this machine's CPU, ONNX Runtime with a thread for each core everywhere.
Each pair is measured in alternating rounds, and compared by the median of the rounds' ratios, so that other load on the
machine matters little. Exit code 1 if a figure misses its target.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Semaphore
from typing import NamedTuple

import numpy as np
from ncd_export.graph import ExportGraph
from ncd_export.repository import add_to_repository
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.onnx import write_onnx
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table

from ncd_serve import Client
from ncd_serve.bundle import LABELS, MANIFEST, MODEL, Bundle, BundleManifest
from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.runners import Answer, Session, open_session
from ncd_serve.triton import TritonServer

CORES = os.cpu_count() or 1
IN_FLIGHT, CLUSTERS, SIDE = 16, 40, 224
PHOTO = (640, 480)
LEAST_TRITON, LEAST_QUERY, MOST_GROWTH = 0.90, 0.85, 1.05
QUICK = "--quick" in sys.argv
ROUNDS, IMAGES, LONG_RUN = (2, 48, 500) if QUICK else (5, 192, 5000)
WAIT_SECONDS = 300
console = Console(width=110)


class Run(NamedTuple):
    """Result of a round: images per second, and the latency of each request in ms."""

    rate: float
    latencies: list[float]


def make_bundle(folder: Path, trunk: str, side: int = SIDE) -> Bundle:
    """Export a model with random weights."""
    folder.mkdir()
    model = DualBranchModel(build_trunk(trunk, resolution=side), known=160, novel=CLUSTERS)
    write_onnx(ExportGraph(model), folder / MODEL, resolution=side, metadata={})
    names = [f"cluster-{number}" for number in range(CLUSTERS)]
    (folder / LABELS).write_text("".join(f"{name}\n" for name in names))
    manifest = BundleManifest(
        bundle_id="benchmark",
        created="",
        dataset="none",
        method="dual",
        preprocess=PreprocessSpec(resolution=side, resize=side * 8 // 7),
        known_classes=[],
        cluster_names=names,
        training={},
        versions={},
        sha256={},
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return Bundle(folder, manifest)


def draw_photos(folder: Path, count: int) -> list[Path]:
    """Draw JPEG files with the size and the detail of photographs: 32 different ones under many names."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(min(count, 32)):
        coarse = rng.integers(0, 256, (PHOTO[1] // 20, PHOTO[0] // 20, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(PHOTO, Image.Resampling.BICUBIC))
        photo = (smooth + rng.normal(0, 12, (PHOTO[1], PHOTO[0], 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(photo).save(folder / f"{number:05}.jpg", quality=90)
    for number in range(32, count):
        (folder / f"{number:05}.jpg").hardlink_to(folder / f"{number % 32:05}.jpg")
    return sorted(folder.iterdir())


def run_directly(session: Session, batches: list[NDArray[np.uint8]]) -> Run:
    latencies = []
    start = time.perf_counter()
    for batch in batches:
        sent = time.perf_counter()
        session.run(["probabilities"], {"image": batch})
        latencies.append((time.perf_counter() - sent) * 1000)
    return Run(sum(map(len, batches)) / (time.perf_counter() - start), latencies)


def run_through_triton(client: Client, batches: list[NDArray[np.uint8]]) -> Run:
    room, latencies = Semaphore(IN_FLIGHT), []

    def note(sent: float) -> Callable[[Future[Answer]], None]:
        def finished(_: Future[Answer]) -> None:
            latencies.append((time.perf_counter() - sent) * 1000)
            room.release()

        return finished

    start = time.perf_counter()
    answers = []
    for batch in batches:
        room.acquire()
        answers.append(client.submit(batch))
        answers[-1].add_done_callback(note(time.perf_counter()))
    for answer in answers:
        answer.result(WAIT_SECONDS)
    return Run(sum(map(len, batches)) / (time.perf_counter() - start), latencies)


def compare_triton(session: Session, client: Client, table: Table) -> bool:
    """Return the rows of the table for both batch sizes, and True if both are fast enough."""
    good = True
    rng = np.random.default_rng(0)
    for size in (1, 8):
        batches = [rng.integers(0, 256, (size, SIDE, SIDE, 3), dtype=np.uint8) for _ in range(IMAGES // size)]
        run_directly(session, batches[:2])
        run_through_triton(client, batches[:IN_FLIGHT])
        pairs = [(run_directly(session, batches), run_through_triton(client, batches)) for _ in range(ROUNDS)]
        ratio = statistics.median(served.rate / direct.rate for direct, served in pairs)
        for name, runs, shown in zip(
            ("ONNX Runtime", "Triton"), zip(*pairs, strict=True), ("", f"{ratio:.2f}"), strict=True
        ):
            times = [latency for run in runs for latency in run.latencies]
            rate = statistics.median(run.rate for run in runs)
            p50, p99 = np.percentile(times, [50, 99])
            table.add_row(f"{name}, batch {size}", f"{rate:.1f}", f"{p50:.0f}", f"{p99:.0f}", shown)
        good &= ratio >= LEAST_TRITON
    return good


def compare_query(session: Session, client: Client, paths: list[Path], table: Table) -> bool:
    """Return the rows of the table for decoding and model only, and for `query`; True if that is fast enough."""
    rates: dict[str, list[float]] = {"decoding alone": [], "model alone": [], "query": []}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        with ThreadPoolExecutor(CORES) as pool:
            images = list(pool.map(lambda path: load_array(path, client.preprocess), paths))
        rates["decoding alone"].append(len(paths) / (time.perf_counter() - start))
        batches = [np.stack(images[begin : begin + 8]) for begin in range(0, len(images), 8)]
        rates["model alone"].append(run_directly(session, batches).rate)
        start = time.perf_counter()
        assert all(row.status == "ok" for row in client.assign(paths))
        rates["query"].append(len(paths) / (time.perf_counter() - start))
    sums = [1 / (1 / decode + 1 / model) for decode, model, _ in zip(*rates.values(), strict=True)]
    ratio = statistics.median(query / both for query, both in zip(rates["query"], sums, strict=True))
    rates = {
        "decoding alone": rates["decoding alone"],
        "model alone": rates["model alone"],
        "both in sum": sums,
        "query": rates["query"],
    }
    for name, values in rates.items():
        shown = f"{ratio:.2f}" if name == "query" else ""
        table.add_row(f"{name}, JPEG {PHOTO[0]} x {PHOTO[1]}", f"{statistics.median(values):.1f}", "", "", shown)
    return ratio >= LEAST_QUERY


def watch_memory(url: str, folder: Path, rows: Path) -> bool:
    """Run `ncd-serve query` on many images in a separate process; return its memory, and True if it stays flat."""
    command = [sys.executable, "-m", "ncd_serve", "query", str(folder), "--url", f"grpc://{url}", "--out", str(rows)]
    used = list(_memory_of(command))
    assert len(rows.read_text().splitlines()) == LONG_RUN
    steps = [used[len(used) * step // 10] for step in range(1, 10)]
    console.print(f"query on {LONG_RUN:,} images, MB of memory at every tenth: {' '.join(f'{mb:.0f}' for mb in steps)}")
    return max(used[len(used) // 2 :]) <= MOST_GROWTH * max(used[: len(used) // 2])


def _memory_of(command: list[str]) -> Iterator[float]:
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            if "VmRSS" in status:
                yield int(status.split("VmRSS:")[1].split()[0]) / 1024
            time.sleep(0.2)
    assert process.returncode == 0


def main() -> None:
    """Print all figures."""
    table = Table("", "images/s", "p50 ms", "p99 ms", "of what it is compared with", title=f"ResNet-50, {CORES} cores")
    with TemporaryDirectory() as name:
        folder = Path(name)
        large, small = (make_bundle(folder / trunk, trunk) for trunk in ("resnet50", "small_resnet"))
        for bundle in (large, small):
            add_to_repository(bundle, folder / "repository" / bundle.folder.name, name="ncd_global")
        paths = draw_photos(folder / "photos", LONG_RUN)
        session = open_session(large.model_path, threads=CORES)
        with TritonServer(folder / "repository" / "resnet50") as server:
            server.wait_ready(WAIT_SECONDS)
            with Client(server.grpc_url, concurrency=IN_FLIGHT, timeout=WAIT_SECONDS) as client:
                good = compare_triton(session, client, table)
                good &= compare_query(session, client, paths[:IMAGES], table)
        console.print(table)
        # Memory does not depend on the trunk: a small one is done sooner.
        with TritonServer(folder / "repository" / "small_resnet") as server:
            server.wait_ready(WAIT_SECONDS)
            good &= watch_memory(server.grpc_url, folder / "photos", folder / "rows.jsonl")
    sys.exit(not good)


if __name__ == "__main__":
    main()
