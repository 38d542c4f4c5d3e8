"""Cost of a training step against the plain form of the same computation: time per image and peak memory.

    .venv/bin/python benchmarks/training_speed.py [TRUNK ...]
    .venv/bin/python benchmarks/training_speed.py cheaper

Plain form: default memory format, the two views in two passes, all pairs enumerated as repeated tensors, gradients for
all tokens of a transformer, JPEGs decoded at full size. `files` is `ncd-serve train --set optim.onnx_trunk=true`,
`cached` is `train --cache-views K`, `limit` is the cost without decoding and trunk: branches and objective on maps that
are already in memory. Each form runs in a separate process with one thread, in turns; times are CPU time, the best of
the rounds, so that other load matters little. The last column is the arithmetic rate of a step divided by that of a
large matrix product: a value near 1 can hardly be improved. It is meaningless for EfficientNet, because torch counts a
depthwise convolution as a full one.

`cheaper` compares steps of `quick` on random cached maps with what they were before: batch norm by torch, a mean over
places instead of a sum, and memory that goes back to the system. In one process, in turns, with full memories; CPU
time, medians. `difference` is the largest between weights after the first step.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MethodType

import numpy as np
import torch
import torch.nn.functional as F
from ncd_training.base.memory import kept_memory
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import DataConfig, ModelConfig, TrainConfig
from ncd_training.data.views import BatchPlan, FileViews, batches
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import BranchOutput, DualBranchModel
from ncd_training.model.folding import fold_norms
from ncd_training.model.map_cache import CachedViews, cache_views
from ncd_training.model.onnx import OnnxTrunk
from ncd_training.model.trunk import ClassTokenTail, ConvTail, TailOutput
from ncd_training.objective.dual import DualObjective
from ncd_training.objective.losses import bank_log_probabilities, symmetric_kl
from ncd_training.objective.method import Batch
from ncd_training.run.step import TrainState, build_optimizer, train_step
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ncd_serve import progress
from ncd_serve.memory import peak_memory

SIZES = {"resnet50": 224, "vit_small": 224, "efficientnet_lite0": 160}
FORMS = ("plain", "files", "cached", "limit")
LABELLED, UNLABELLED, STEPS, ROUNDS = 16, 8, 2, 2
MATRIX, PRODUCTS = 2048, 5
KNOWN, NOVEL = 160, 40
PHOTO = (3000, 2000)
LEAST_FILES, LEAST_CACHED = 1.3, 0.9
MAP_SIDES, MAP_WIDTH, BATCH, TURNS = {160: 5, 224: 7}, 192, (128, 64), 5
LEAST_CHEAPER, MOST_DIFFERENT = 1.3, 1e-4


def draw_photos(folder: Path) -> None:
    """Draw JPEG files with the size and the detail of photographs."""
    rng = np.random.default_rng(0)
    for number in range(LABELLED + UNLABELLED):
        coarse = rng.integers(0, 256, (PHOTO[1] // 20, PHOTO[0] // 20, 3), dtype=np.uint8)
        fine = rng.normal(0, 12, (PHOTO[1], PHOTO[0], 3))
        smooth = np.asarray(Image.fromarray(coarse).resize(PHOTO, Image.Resampling.BICUBIC))
        Image.fromarray((smooth + fine).clip(0, 255).astype(np.uint8)).save(folder / f"{number:03}.jpg", quality=90)


def build(trunk: str, *, plain: bool) -> TrainState:
    config, parts = TrainConfig(), build_trunk(trunk, resolution=SIZES[trunk])
    if plain and isinstance(parts.tail, ClassTokenTail):
        parts = replace(parts, tail=WholeTail(parts.tail.block, parts.tail.norm, parts.tail.layout))
    model = DualBranchModel(parts, known=KNOWN, novel=NOVEL)
    if not plain:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for branch in model.branches:
            fold_norms(branch.tail)
        model.trunk.in_onnx = OnnxTrunk(ModelConfig(backbone=trunk), SIZES[trunk])
    objective = DualObjective(model.dim, model=config.model, labels=config.pseudo_labels, loss=config.loss)
    model.train()
    return TrainState(model, objective, torch.optim.SGD(model.branches.parameters(), 0.01, momentum=0.9))


class WholeTail(ClassTokenTail):
    """Tail with gradients for all tokens, even those that no loss term depends on."""

    def forward(self, tokens: Tensor) -> TailOutput:
        features = torch.relu(self.norm(self.block(tokens)))
        return TailOutput(self.layout.to_map(features), features[:, 0])


class FullSizeViews(FileViews):
    """Views of JPEGs that are decoded at full size."""

    def __init__(self, paths: list[Path], data: DataConfig) -> None:
        super().__init__(paths, data)
        self._at_least = None  # type: ignore[assignment]


def plain_step(state: TrainState, views: list[Tensor], labels: Tensor, generator: torch.Generator) -> None:
    """Train one step with the five terms in their straightforward form."""
    model, objective, n = state.model, state.method, len(labels)
    assert isinstance(objective, DualObjective)
    with torch.no_grad():
        maps = [model.trunk(view) for view in views]
    first, second = map(model, maps)
    terms = [F.cross_entropy(a.known_logits[:n], labels) for a in first]
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        terms.append(enumerated_bce(a, b, n, top_k=(5, 30)[number], described=describe(objective, number, a, n)))
        terms += [F.mse_loss(x.softmax(1), y.softmax(1)) for x, y in zip(a[2:], b[2:], strict=True)]
    if len(objective.banks.filled[0]):
        spreads = [
            bank_log_probabilities(a.embedding[n:], bank, 0.07)
            for a, bank in zip(first, objective.banks.filled, strict=True)
        ]
        terms.append(symmetric_kl(*spreads))
    state.optimizer.zero_grad()
    torch.stack(terms).sum().backward()
    state.optimizer.step()
    batch = Batch(first, second, labels, torch.arange(UNLABELLED), 1.0)
    objective.remember(batch, branches=model.branches, generator=generator)


def describe(objective: DualObjective, number: int, output: BranchOutput, n: int) -> Tensor:
    if number == 0:
        return output.embedding[n:].detach()
    dictionary = objective.pseudo_labels[number].dictionary
    if not len(dictionary.filled):
        dictionary.push(output.embedding.detach())
    return dictionary.describe(output.parts.detach()[n:])


def enumerated_bce(a: BranchOutput, b: BranchOutput, n: int, *, top_k: int, described: Tensor) -> Tensor:
    """Return the pairwise loss over all pairs as two long lists."""
    p, q = a.cluster_logits[n:].softmax(1), b.cluster_logits[n:].softmax(1)
    m = len(p)
    ranks = described.argsort(dim=1, descending=True)[:, :top_k]
    left, right = ranks.repeat_interleave(m, 0), ranks.repeat(m, 1)
    shared = (left.unsqueeze(2) == right.unsqueeze(1)).any(dim=2).float().mean(dim=1)
    agreement = (p.repeat_interleave(m, 0) * q.repeat(m, 1)).sum(1).clamp(1e-7, 1 - 1e-7)
    return F.binary_cross_entropy(agreement, shared)


def measure_form(trunk: str, form: str, folder: Path) -> dict[str, float]:
    """Return seconds per image of a step (two views each), and the peak memory of the process in MB."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    state = build(trunk, plain=form == "plain")
    paths = sorted(folder.glob("*.jpg"))
    data = DataConfig(resolution=SIZES[trunk], resize=SIZES[trunk] + 32, cache_views=2)
    plan = BatchPlan(LABELLED, UNLABELLED, LABELLED, UNLABELLED, seed=0)
    views: FileViews | CachedViews
    if form in {"cached", "limit"}:
        views = cache_views(state.model.trunk, paths, data, folder=folder, progress=progress.SILENT)
    else:
        views = FullSizeViews(paths, data) if form == "plain" else FileViews(paths, data)
    loader = batches(views, plan, workers=0, device=state.model.device)
    labels, generator = torch.arange(LABELLED) % KNOWN, torch.Generator()
    held = next(iter(loader)) if form == "limit" else None

    def step() -> None:
        batch = held or next(iter(loader))
        if form == "plain":
            plain_step(state, batch, labels, generator)
        else:
            train_step(state, batch, labels, rows=torch.arange(UNLABELLED), ramp=1.0, generator=generator)

    with FlopCounterMode(display=False) as counter:  # which warms up, too
        step()
    operations = counter.get_total_flops() + (unseen_operations(state, SIZES[trunk]) if form == "files" else 0)
    best = math.inf
    for plan.epoch in range(1, STEPS + 1):
        best = min(best, seconds_of(step))
    peak = peak_memory() / 2**20
    rate = operations / best / matrix_product_rate()
    return {"seconds": best / (LABELLED + UNLABELLED), "megabytes": peak, "rate": rate}


def unseen_operations(state: TrainState, side: int) -> int:
    """Return the operations of a step in ONNX Runtime, which torch cannot count: those of one view times the views."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        state.model.trunk(torch.zeros(1, 3, side, side, dtype=torch.uint8))
    return 2 * (LABELLED + UNLABELLED) * counter.get_total_flops()


def seconds_of(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def matrix_product_rate() -> float:
    """Return the operations per second of a large matrix product."""
    matrix = torch.rand(MATRIX, MATRIX)
    return 2 * MATRIX**3 / min(seconds_of(lambda: matrix @ matrix) for _ in range(PRODUCTS))


def in_turns(trunk: str, folder: Path) -> dict[str, dict[str, float]]:
    """Measure every form in a separate process, in alternating rounds."""
    answers: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for _ in range(ROUNDS):
        for form in FORMS:
            command = [sys.executable, __file__, "--measure", trunk, form, str(folder)]
            answers[form].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    return {form: min(found, key=itemgetter("seconds")) for form, found in answers.items()}


def main() -> None:
    """Print the table; exit code 1 if a figure misses its target."""
    columns = "trunk", "form", "ms an image", "times as fast as plain", "peak MB", "of a matrix product's rate"
    table = Table(*columns, title="a training step")
    missed = False
    with TemporaryDirectory() as folder:
        draw_photos(Path(folder))
        for trunk in sys.argv[1:] or SIZES:
            figures = in_turns(trunk, Path(folder))
            speed = {form: figures["plain"]["seconds"] / figure["seconds"] for form, figure in figures.items()}
            for form, figure in figures.items():
                cells = f"{figure['seconds'] * 1000:.0f}", f"{speed[form]:.2f}", f"{figure['megabytes']:.0f}"
                table.add_row(f"{trunk} {SIZES[trunk]} px", form, *cells, f"{figure['rate']:.2f}")
            missed |= speed["files"] < LEAST_FILES or speed["cached"] < LEAST_CACHED * speed["limit"]
            missed |= figures["files"]["megabytes"] > figures["plain"]["megabytes"]
    Console(width=110).print(table)
    sys.exit(missed)


class CachedSteps:
    """Steps on random maps, as they are or as they were before."""

    def __init__(self, resolution: int, *, before: bool) -> None:
        torch.manual_seed(0)
        config = resolve_config(recipes=["quick"], overrides={"data.dataset": "cub200"})
        parts = build_trunk("efficientnet_lite0", resolution=resolution)
        model = DualBranchModel(parts, known=KNOWN, novel=NOVEL, model=config.model, labels=config.pseudo_labels)
        for branch in model.branches:
            if before:
                branch.tail.forward = MethodType(mean_of_places, branch.tail)
            else:
                fold_norms(branch.tail)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        method = DualObjective(model.dim, model=config.model, labels=config.pseudo_labels, loss=config.loss)
        method.banks.push([torch.rand(config.model.bank_size, model.dim) for _ in model.branches])
        for judge in method.pseudo_labels:
            judge.dictionary.push(torch.rand(config.model.dictionary_size, model.dim))
        self.state = TrainState(model.train(), method.train(), build_optimizer(model, method, config.optim))
        side, self.memory = MAP_SIDES[resolution], nullcontext if before else kept_memory
        self.maps = torch.rand(2, sum(BATCH), MAP_WIDTH, side, side)
        self.labels, self.rows = torch.randint(0, KNOWN, BATCH[:1]), torch.arange(BATCH[1])

    def seconds(self) -> float:
        """Return the CPU time of a step after another one."""
        with self.memory():
            self.step()
            return seconds_of(self.step)

    def weights(self) -> Tensor:
        """Return all weights of the branches in a row."""
        return torch.cat([weight.detach().flatten() for weight in self.state.model.branches.parameters()])

    def step(self) -> None:
        generator = torch.Generator().manual_seed(0)
        train_step(self.state, [*self.maps], self.labels, rows=self.rows, ramp=1.0, generator=generator)


def mean_of_places(tail: ConvTail, maps: Tensor) -> TailOutput:
    parts = tail.stages(maps)
    return TailOutput(parts, parts.mean(dim=(2, 3)))


def compare_with_before() -> None:
    """Print how much cheaper steps have become; exit code 1 if it is too little or weights differ."""
    torch.set_num_threads(1)
    table, missed = Table("maps", "s before", "s", "times as fast", "difference", title="a step on cached maps"), False
    for resolution, side in MAP_SIDES.items():
        forms = [CachedSteps(resolution, before=before) for before in (True, False)]
        for form in forms:
            form.step()
        expected, found = (form.weights() for form in forms)
        different = float((found - expected).abs().max())
        turns = [[form.seconds() for form in forms] for _ in range(TURNS)]
        before, now = map(median, zip(*turns, strict=True))
        figures = f"{before:.2f}", f"{now:.2f}", f"{before / now:.2f}", f"{different:.1e}"
        table.add_row(f"{side} x {side} ({resolution} px)", *figures)
        missed |= before / now < LEAST_CHEAPER or different > MOST_DIFFERENT
    Console(width=110).print(table)
    sys.exit(missed)


if __name__ == "__main__":
    if sys.argv[1:] == ["cheaper"]:
        compare_with_before()
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure_form(sys.argv[2], sys.argv[3], Path(sys.argv[4]))))
    else:
        main()
