"""Speed of an exported ResNet-50 at 224 px: ONNX Runtime against torch, int8 against fp32, agreement of int8.

    .venv/bin/python benchmarks/export.py

Times are CPU time of one thread, variants in turns, best of several rounds, so that other load matters little.
torch runs channels last in inference mode. Speed does not depend on the weights; agreement does, so it is measured on
the same network after a short training on the embedded letters at 64 px, on images that int8 was not calibrated on.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from ncd_export.graph import ExportGraph
from ncd_export.precision import to_int8
from ncd_export.verify import compare_precisions
from ncd_training.data.datasets.glyphs import NOVEL, write_glyphs
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.onnx import write_onnx
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.runners import open_session

TRUNK, RESOLUTION, BATCHES = "resnet50", 224, (1, 8, 32)
ROUNDS = {1: 12, 8: 5, 32: 4}
TRAINED_AT, EPOCHS, BATCH = 64, 6, 32
LEAST_FP32, LEAST_AGREEMENT = 1.2, 0.98
# Without VNNI an int8 product takes two instructions of 32, where fp32 takes four of 8: twice is the limit of the
# arithmetic itself, and what is not arithmetic comes on top.
HAS_VNNI = "vnni" in Path("/proc/cpuinfo").read_text()
LEAST_INT8 = 2.0 if HAS_VNNI else 1.7
console = Console(width=120)


def build(clusters: int) -> DualBranchModel:
    torch.manual_seed(0)
    return DualBranchModel(build_trunk(TRUNK, resolution=RESOLUTION), known=160, novel=clusters)


def write_models(
    model: DualBranchModel, folder: Path, resolution: int, calibration: NDArray[np.uint8]
) -> tuple[Path, Path]:
    """Write the fp32 and the int8 file."""
    fp32, int8 = folder / f"fp32-{resolution}.onnx", folder / f"int8-{resolution}.onnx"
    write_onnx(ExportGraph(model), fp32, resolution=resolution, metadata={})
    to_int8(fp32, int8, np.array_split(calibration, -(-len(calibration) // 8)))
    return fp32, int8


def measure(folder: Path) -> list[dict[str, float]]:
    """Return milliseconds per image of every variant, for every batch size."""
    model = build(40).eval()
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (max(BATCHES), RESOLUTION, RESOLUTION, 3), dtype=np.uint8)
    sessions = [open_session(path, threads=1) for path in write_models(model, folder, RESOLUTION, noise[:8])]
    graph = ExportGraph(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled = torch.compile(graph, dynamic=False) if shutil.which("g++") else None
    rows = []
    for batch in BATCHES:
        images = noise[:batch]
        tensor, feeds = torch.from_numpy(images), {"image": images}
        forms: dict[str, Callable[[], object]] = {"torch eager": partial(graph, tensor)}
        if compiled is not None:
            forms["torch.compile"] = partial(compiled, tensor)
        for name, session in zip(("ONNX fp32", "ONNX int8"), sessions, strict=True):
            forms[name] = partial(session.run, list(graph.output_names), feeds)
        rows.append({name: 1000 * seconds / batch for name, seconds in in_turns(forms, ROUNDS[batch]).items()})
    return rows


@torch.inference_mode()
def in_turns(forms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    for form in forms.values():
        form()
    best = dict.fromkeys(forms, math.inf)
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.thread_time()
            form()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def agreement(folder: Path) -> float:
    """Return the share of held-out letters with the same cluster in int8 and fp32, after a short training."""
    spec = PreprocessSpec(resolution=TRAINED_AT, resize=TRAINED_AT)
    data = write_glyphs(folder / "glyphs", train=80, test=40)
    images, labels = {}, {}
    for split in ("train", "test"):
        paths = [(path, label) for label, name in enumerate(NOVEL) for path in sorted((data / split / name).iterdir())]
        images[split] = np.stack([load_array(path, spec) for path, _ in paths])
        labels[split] = torch.tensor([label for _, label in paths])
    model = build(len(NOVEL))
    train(model, torch.from_numpy(images["train"]), labels["train"])
    files = write_models(model.eval(), folder, TRAINED_AT, images["train"][::4])
    names = ExportGraph(model).output_names
    found = compare_precisions(
        *files, names, images["test"], precision="int8", calibrated_on=100, required=0.0, max_batch=32
    )
    with torch.inference_mode():
        right = (ExportGraph(model)(torch.from_numpy(images["test"]))["cluster_id"] == labels["test"]).float().mean()
    console.print(
        f"{TRUNK} trained for {EPOCHS} epochs on letters at {TRAINED_AT} px ({right:.3f} right of "
        f"{len(labels['test'])} held-out images): int8 agrees with fp32 on {found.equal_ids:.3f} of them",
        highlight=False,
    )
    return found.equal_ids


def train(model: DualBranchModel, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Train the served part with cross entropy: the comparison needs learned weights."""
    graph = ExportGraph(model).train().requires_grad_()
    for module in model.trunk.stages.modules():
        module.train()
    optimizer = torch.optim.AdamW(graph.parameters(), 1e-3)
    for epoch in range(EPOCHS):
        for chosen in torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).split(BATCH):
            probabilities = graph(images[chosen])["probabilities"]
            optimizer.zero_grad()
            F.nll_loss((probabilities + 1e-9).log(), labels[chosen]).backward()
            optimizer.step()


def show(rows: list[dict[str, float]]) -> bool:
    """Print the table, and return True if a figure misses its target."""
    table = Table("batch", *rows[0], "fp32 / eager", *(["fp32 / compile"] if "torch.compile" in rows[0] else []))
    table.add_column("int8 / fp32")
    table.title = f"{TRUNK} at {RESOLUTION} px, one thread: ms an image, and how many times as fast"
    missed = False
    for batch, row in zip(BATCHES, rows, strict=True):
        over = [row[name] / row["ONNX fp32"] for name in row if name.startswith("torch")]
        gain = row["ONNX fp32"] / row["ONNX int8"]
        table.add_row(str(batch), *(f"{ms:.1f}" for ms in row.values()), *(f"{ratio:.2f}" for ratio in (*over, gain)))
        missed |= over[0] < LEAST_FP32 or gain < LEAST_INT8
    console.print(table)
    if "torch.compile" not in rows[0]:
        console.print("torch.compile is left out: it needs a C++ compiler (g++)")
    if not HAS_VNNI:
        console.print("this CPU has no VNNI: int8 arithmetic is at most 2 times as fast as fp32", highlight=False)
    return missed


def main() -> None:
    """Print all figures; exit code 1 if one misses its target."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        missed = show(measure(Path(folder)))
        missed |= agreement(Path(folder)) < LEAST_AGREEMENT
    sys.exit(missed)


if __name__ == "__main__":
    main()
