"""Cost of the pairwise and bank terms: its growth, and its share of a ResNet-50 step at batch 128+64.

    .venv/bin/python benchmarks/objective_cost.py

Growth is the exponent between neighbouring sizes, log(time ratio) / log(size ratio): by the formulas
at most 2 for the batch and 1 for the banks. Exit code 1 if the share is above a tenth.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
from ncd_training.config.schema import LossConfig, ModelConfig, TrainConfig
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import BranchOutput, DualBranchModel
from ncd_training.objective.dual import DualObjective
from ncd_training.objective.method import Batch
from ncd_training.run.step import TrainState, train_step
from rich.console import Console
from rich.table import Table

DIM, SIDE, KNOWN, NOVEL = 2048, 7, 160, 40
LABELLED, UNLABELLED, BANK = 128, 64, 2048
BATCHES, BANKS = (32, 64, 128, 256), (2048, 4096, 8192, 16384)
REPEATS, MOST = 3, 0.10


def outputs(images: int) -> list[BranchOutput]:
    """Return random outputs of two ResNet-50 branches for a batch."""
    return [
        BranchOutput(
            torch.rand(images, DIM, SIDE, SIDE),
            torch.rand(images, DIM, requires_grad=True),
            torch.randn(images, KNOWN, requires_grad=True),
            torch.randn(images, NOVEL, requires_grad=True),
        )
        for _ in range(2)
    ]


def pair_and_bank_seconds(*, unlabelled: int, bank: int) -> float:
    """Return the time of forward and backward of pseudo labels, pairwise terms and distillation, with full memories."""
    model = ModelConfig(bank_size=bank, dictionary_size=bank)
    loss = LossConfig(cross_entropy=False, consistency=False)
    objective = DualObjective(DIM, model=model, labels=TrainConfig().pseudo_labels, loss=loss)
    objective.banks.push([torch.rand(bank, DIM) for _ in range(2)])
    for judge in objective.pseudo_labels:
        judge.dictionary.push(torch.rand(bank, DIM))
    first, second = outputs(unlabelled), outputs(unlabelled)
    labels = torch.zeros(0, dtype=torch.long)
    batch = Batch(first, second, labels, torch.arange(len(first[0].embedding) - len(labels)), 1.0)
    return best(lambda: torch.stack([*objective(batch).values()]).sum().backward())


def step_seconds() -> float:
    """Return the time of a full ResNet-50 step on images at 224 px."""
    config = TrainConfig()
    model = DualBranchModel(build_trunk("resnet50", resolution=224), known=KNOWN, novel=NOVEL)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    objective = DualObjective(DIM, model=config.model, labels=config.pseudo_labels, loss=config.loss)
    state = TrainState(model, objective, torch.optim.SGD(model.branches.parameters(), 0.01))
    views = [torch.randint(0, 256, (LABELLED + UNLABELLED, 3, 224, 224), dtype=torch.uint8) for _ in range(2)]
    labels, generator = torch.arange(LABELLED), torch.Generator()
    rows = torch.arange(len(views[0]) - len(labels))
    return best(lambda: train_step(state, views, labels, rows=rows, ramp=1.0, generator=generator), repeats=1)


def best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the shortest of several times, after a warm-up (unless there is only one)."""
    times = []
    for _ in range(repeats + (repeats > 1)):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def growth_table(title: str, sizes: tuple[int, ...], seconds: Callable[[int], float]) -> Table:
    table = Table("size", "ms", "growth", title=title, title_justify="left")
    earlier: tuple[int, float] | None = None
    for size in sizes:
        taken = seconds(size)
        growth = math.log(taken / earlier[1]) / math.log(size / earlier[0]) if earlier else None
        table.add_row(f"{size:,}", f"{taken * 1000:.0f}", "-" if growth is None else f"{growth:.2f}")
        earlier = size, taken
    return table


def main() -> None:
    """Print both tables and the share."""
    console = Console()
    console.print(
        growth_table(
            f"unlabelled images, memories of {BANK:,}",
            BATCHES,
            lambda size: pair_and_bank_seconds(unlabelled=size, bank=BANK),
        )
    )
    console.print(
        growth_table(
            f"banks and dictionary, {UNLABELLED} unlabelled images",
            BANKS,
            lambda size: pair_and_bank_seconds(unlabelled=UNLABELLED, bank=size),
        )
    )
    part, whole = pair_and_bank_seconds(unlabelled=UNLABELLED, bank=BANK), step_seconds()
    console.print(
        f"pairwise and bank terms: {part:.2f} s of a ResNet-50 step of {whole:.1f} s at batch {LABELLED}+{UNLABELLED} "
        f"and banks of {BANK}: {part / whole:.1%}"
    )
    sys.exit(part / whole > MOST)


if __name__ == "__main__":
    main()
