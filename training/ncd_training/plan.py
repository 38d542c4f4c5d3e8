"""The plan of a run, printed before any training: what on, what with, and what it will cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ncd_training.display import duration

if TYPE_CHECKING:
    from pathlib import Path

    from ncd_training.config import TrainConfig
    from ncd_training.estimate import Cost
    from ncd_training.setup import Setup
    from ncd_training.weights import WeightsReport


def print_plan(setup: Setup, *, steps: int, origin: WeightsReport | None, folder: Path | None) -> None:
    """Images, classes, trunk, device, branches, epochs and steps, run directory, initial weights."""
    manifest, config = setup.manifest, setup.config
    setup.console.print(
        f"[bold]{manifest.name}[/bold]: {len(manifest.labelled):,} labelled images of {len(manifest.known_classes)} "
        f"known classes, {len(manifest.unlabelled):,} unlabelled images for {setup.clusters} clusters\n"
        f"{config.method.name}: {config.model.trunk} at {config.data.resolution} px on {device_name()}, "
        f"branches {config.model.branches}, "
        f"{_epochs(config.optim.epochs)} of {steps} steps"
        + (f"; run directory [bold]{folder}[/bold]" if folder else "; a dry run, nothing is written"),
        highlight=False,
        soft_wrap=True,
    )
    for note in manifest.notes:
        setup.console.print(f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if origin is not None:
        setup.console.print(origin.line, highlight=False, markup=False, soft_wrap=True)
    elif not (config.rotations.epochs or config.from_labels.epochs):
        text = "the frozen trunk has random weights: give --weights PATH, or make them with `ncd-serve pretrain`"
        setup.console.print(text, style="yellow", highlight=False, soft_wrap=True)


def device_name() -> str:
    """What computes."""
    return f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "cpu"


def print_cost(setup: Setup, cost: Cost, *, steps: int) -> None:
    """Memory and time, as measured."""
    setup.console.print(cost_line(setup, cost, steps=steps), highlight=False, soft_wrap=True)


def cost_line(setup: Setup, cost: Cost, *, steps: int) -> str:
    """`about 12 min (0.9 s a step, 37 steps an epoch), 1.2 GB of memory`, and what the time leaves out."""
    data, optim = setup.config.data, setup.config.optim
    step = cost.step_seconds(workers=data.workers, cached=bool(data.cache_views))
    total, line = optim.epochs * steps * step, ""
    if data.cache_views:
        caching = cost.cache_seconds(len(setup.manifest.images) * data.cache_views, workers=data.workers)
        total, line = total + caching, f", {duration(caching)} to cache views"
    before = stages_before(setup.config)
    return (
        f"about {duration(total)} ({step:.2g} s a step, {steps} steps an epoch{line})"
        f"{', not counting ' + ' and '.join(before) if before else ''}; {cost.memory / 1e9:.1f} GB of memory"
    )


def stages_before(config: TrainConfig) -> list[str]:
    """What comes before the branches part, e.g. `3 epochs of rotations`."""
    stages = {
        "rotations": config.rotations.epochs,
        "training from labels": config.from_labels.epochs,
        "supervised training": config.supervised.epochs,
    }
    return [f"{_epochs(epochs)} of {name}" for name, epochs in stages.items() if epochs]


def _epochs(number: int) -> str:
    return f"{number} epoch{'s' * (number != 1)}"
