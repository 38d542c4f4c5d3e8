"""Hardware that a load needs: each figure with its formula, and whether it was measured.

A figure is `measured` on this machine or `computed` from others. The cluster is not
known here: figures of its network and storage are requirements.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ncd_serve.deploy.memory import OVERHEAD_MIB, peak_mib, pod_mib
from ncd_serve.errors import DataError
from ncd_serve.preprocess import load_array, read_image
from ncd_serve.runners import OnnxRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ncd_serve.bundle import Bundle
    from ncd_serve.preprocess import PreprocessSpec

Origin = Literal["measured", "computed"]
DAY = 86_400  # s
BATCH, _LARGEST_BATCH = 8, 64
_ROUNDS, _MAX_SAMPLES = 5, 64
ROW_BYTES = 60.0  # a row in Parquet, rounded up: 600 rows with short paths took 51 B each


@dataclass(frozen=True)
class Demand:
    """Load to plan for."""

    images_per_day: float
    peak: float = 2.0  # the busiest second over the average one
    utilisation: float = 0.7  # how busy a core or GPU may be, so that queues stay short
    cores: int = 8  # of one replica
    gpu_rate: float | None = None  # images a second on one GPU, as its owner measured it
    training_images: float = 0.0
    views: int = 8


@dataclass(frozen=True)
class Figures:
    """Cost of one image on one core of this machine."""

    model_ms: float
    decode_ms: float
    file_bytes: float
    tensor_bytes: int
    peak_mib: int  # of a process that answered a batch of the largest size
    view_bytes: float | None  # of one cached view; missing in bundles of older versions


@dataclass(frozen=True)
class Quantity:
    """Estimate of one quantity, with its formula."""

    what: str
    value: float
    unit: str
    formula: str
    origin: Origin


def measure_costs(bundle: Bundle, samples: Sequence[Path]) -> Figures:
    """Measure the model and the decoding of real images in one thread; return medians over several rounds."""
    spec = bundle.manifest.preprocess
    chosen = samples[:: max(1, -(-len(samples) // _MAX_SAMPLES))]
    if not chosen:
        raise DataError("no images to measure with", hint="give --sample a folder of typical images")
    runner = OnnxRunner(bundle, threads=1)
    files = [_readable(path, spec) for path in chosen]
    images = np.stack([load_array(data, spec) for data in files[:BATCH]])
    images = np.resize(images, (BATCH, *images.shape[1:]))
    runner.answer(images)  # the first one takes memory and chooses kernels
    model = _median_ms(lambda: runner.answer(images)) / BATCH
    decode = _median_ms(lambda: [load_array(data, spec) for data in files]) / len(files)
    size = bundle.manifest.training.get("view_bytes")
    return Figures(
        model_ms=model,
        decode_ms=decode,
        file_bytes=statistics.mean(map(len, files)),
        tensor_bytes=int(np.prod(images.shape[1:])),
        peak_mib=peak_mib(bundle, _LARGEST_BATCH),
        view_bytes=float(size) if isinstance(size, (int, float)) else None,
    )


def _readable(path: Path, spec: PreprocessSpec) -> bytes:
    try:
        data = read_image(path)
        load_array(data, spec)
    except DataError as error:
        raise DataError(f"{path}: {error}", hint="give --sample images that can be read") from None
    return data


def size_up(demand: Demand, figures: Figures) -> list[Quantity]:
    """Return the estimates, each after those that it depends on."""
    peak = demand.images_per_day / DAY * demand.peak
    lines = [
        Quantity(
            "model, one core", figures.model_ms, "ms an image", "ONNX Runtime, one thread, batches of 8", "measured"
        ),
        Quantity("decoding, one core", figures.decode_ms, "ms an image", "the sample's files", "measured"),
        Quantity("a file", figures.file_bytes / 1e3, "kB", "mean of the sample", "measured"),
        Quantity(
            "images at the peak",
            peak,
            "a second",
            f"{_n(demand.images_per_day)} / 86,400 s x {_n(demand.peak)}",
            "computed",
        ),
    ]
    lines += _on_cpus(demand, figures, peak) if demand.gpu_rate is None else _on_gpus(demand, figures, peak)
    lines += [
        Quantity(
            "memory of a replica",
            pod_mib(figures.peak_mib) / 1024,
            "GiB",
            f"1.5 x {figures.peak_mib} MiB, measured, + {OVERHEAD_MIB} MiB, as in the manifests",
            "computed",
        ),
        Quantity(
            "network, decoded images",
            peak * figures.tensor_bytes * 8 / 1e9,
            "Gbit/s",
            f"{_n(peak)} x {figures.tensor_bytes:,} B x 8",
            "computed",
        ),
        Quantity(
            "network, image files",
            peak * figures.file_bytes * 8 / 1e9,
            "Gbit/s",
            f"{_n(peak)} x {_n(figures.file_bytes)} B x 8",
            "computed",
        ),
        Quantity(
            "rows of a day",
            demand.images_per_day * ROW_BYTES / 1e9,
            "GB",
            f"{_n(demand.images_per_day)} x {_n(ROW_BYTES)} B in Parquet",
            "computed",
        ),
    ]
    return lines + _training(demand, figures)


def _on_cpus(demand: Demand, figures: Figures, peak: float) -> list[Quantity]:
    each = figures.model_ms + figures.decode_ms
    cores = peak * each / 1000 / demand.utilisation
    replicas = math.ceil(cores / demand.cores)
    return [
        Quantity("cores", cores, "", f"{_n(peak)} x {_n(each)} ms / 1000 / {_n(demand.utilisation)}", "computed"),
        Quantity("replicas", max(replicas, 1), "", f"cores / {demand.cores} a replica, rounded up", "computed"),
    ]


def _on_gpus(demand: Demand, figures: Figures, peak: float) -> list[Quantity]:
    assert demand.gpu_rate is not None
    gpus = max(1, math.ceil(peak / (demand.gpu_rate * demand.utilisation)))
    decoding = peak * figures.decode_ms / 1000 / demand.utilisation
    return [
        Quantity(
            "GPUs, one a replica",
            gpus,
            "",
            f"{_n(peak)} / ({_n(demand.gpu_rate)} x {_n(demand.utilisation)}), rounded up",
            "computed",
        ),
        Quantity(
            "cores that decode",
            decoding,
            "",
            f"{_n(peak)} x {_n(figures.decode_ms)} ms / 1000 / {_n(demand.utilisation)}",
            "computed",
        ),
    ]


def _training(demand: Demand, figures: Figures) -> list[Quantity]:
    if not demand.training_images:
        return []
    if figures.view_bytes is None:
        raise DataError("the bundle does not state the size of a cached view", hint="export the run again")
    disk = demand.training_images * demand.views * figures.view_bytes
    formula = f"{_n(demand.training_images)} x {demand.views} views x {_n(figures.view_bytes)} B"
    return [Quantity("disk for cached views", disk / 1e9, "GB", formula, "computed")]


def _median_ms(work: Callable[[], object]) -> float:
    """Return the median CPU time of this thread in ms, so that other load on the machine matters little."""
    times = []
    for _ in range(_ROUNDS):
        start = time.thread_time()
        work()
        times.append((time.thread_time() - start) * 1000)
    return statistics.median(times)


def _n(value: float) -> str:
    """Return a number as text for people."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
