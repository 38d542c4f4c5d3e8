"""Plan of a run, printed before training starts: images, model, device, expected time and memory."""

from __future__ import annotations

import os
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.data import default_collate

from ncd_serve.errors import UsageError
from ncd_serve.memory import peak_memory
from ncd_training.base.memory import kept_memory
from ncd_training.base.randomness import generator_for
from ncd_training.config.schema import StageConfig
from ncd_training.data.views import FileViews
from ncd_training.model.hub import restriction
from ncd_training.run.step import train_step
from ncd_training.summary.figures import epochs_in_words, stages_before
from ncd_training.summary.live import duration

if TYPE_CHECKING:
    from pathlib import Path

    from ncd_serve.progress import Progress
    from ncd_training.config.schema import TrainConfig
    from ncd_training.data.manifest import Manifest
    from ncd_training.data.prepare import Setup
    from ncd_training.data.views import BatchPlan
    from ncd_training.model.weights import WeightsReport
    from ncd_training.run.step import TrainState


def plan_lines(
    setup: Setup, *, steps: int, origin: WeightsReport | None, folder: Path | None
) -> list[tuple[str, str | None]]:
    """Return the plan as lines with a style each: images, backbone, device, epochs, run directory, initial weights."""
    manifest, config = setup.manifest, setup.config
    known = f"{len(manifest.labelled):,} labelled images of {len(manifest.known_classes)} known classes"
    if not manifest.labelled:
        known = "no labelled images, so clusters follow the backbone's features alone"
    lines: list[tuple[str, str | None]] = [
        (
            f"{manifest.name}: {known}, {len(manifest.unlabelled):,} unlabelled images for {setup.clusters} clusters",
            None,
        ),
        (
            f"{config.method.name}: {config.model.backbone} at {config.data.resolution} px on {device_name()}, "
            f"branches {config.model.branches}, "
            f"{epochs_in_words(config.optim.epochs)} of {steps} steps; "
            + (f"run directory {folder}" if folder else "a dry run, nothing is written"),
            None,
        ),
    ]
    lines += [(f"note: {note}", "yellow") for note in manifest.notes]
    if origin is not None:
        lines.append((origin.line, None))
        if text := restriction(config.model.licence):
            lines.append((text, "yellow"))
    elif not (config.rotations.epochs or config.from_labels.epochs):
        lines.append(("the frozen backbone has random weights, as --weights none asks for", "yellow"))
    return lines


def device_name() -> str:
    """Return the name of the compute device."""
    return f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "cpu"


class Expected(NamedTuple):
    """Expected seconds of a run without stages that train the trunk, and the line of the plan that says so."""

    seconds: float
    line: str  # `about 12 min (0.9 s per step, 37 steps per epoch); 1.2 GB of memory`


def expected_cost(config: TrainConfig, cost: StepCost, manifest: Manifest, *, steps: int) -> Expected:
    """Return the expected time of a run on the images of a manifest from the cost of a step."""
    data, optim = config.data, config.optim
    cached, single = bool(data.cache_views), replace(cost, branches=cost.branches / len(config.model.branch_kinds))
    step, of_branch = (some.step_seconds(workers=data.workers, cached=cached) for some in (cost, single))
    total, line = optim.epochs * steps * step, ""
    if data.cache_views and data.cache_views != "auto":
        caching = cost.cache_seconds(len(manifest.images) * data.cache_views, workers=data.workers)
        total, line = total + caching, f", {duration(caching)} to cache views"
    if epochs := config.supervised.epochs:
        clustered = config.self_labels.stage_share * len(manifest.unlabelled) if config.self_labels.weight else 0
        stage = epochs * (len(manifest.labelled) + clustered) / cost.views * of_branch
        total, line = total + stage, f"{line}, {duration(stage)} for {epochs_in_words(epochs)} of supervised training"
    before = stages_before(config.model_copy(update={"supervised": StageConfig()}))
    per_step = f"{step:.2g} s" if step < 90 else duration(step)
    return Expected(
        total,
        f"about {duration(total)} ({per_step} per step, {steps} step{'s' * (steps != 1)} per epoch{line})"
        f"{', not counting ' + ' and '.join(before) if before else ''}; {cost.memory / 1e9:.1f} GB of memory",
    )


def announce_cost(expected: Expected, progress: Progress) -> None:
    """Print the expected cost; on a terminal, ask before a run of more than a day."""
    progress.say(expected.line)
    if expected.seconds > _DAY_SECONDS and not progress.confirm("This takes more than a day. Start all the same?"):
        raise UsageError(
            "not started", hint="take fewer epochs (--set optim.epochs=N), a smaller --backbone, or --cache-views auto"
        )


_DAY_SECONDS = 86_400.0
TIMED_STEPS = 2  # the first one is slower: it allocates memory and chooses kernels
_SLOW_STEP_SECONDS = 5.0  # after a slower first step, the second is not run


@dataclass(frozen=True)
class StepCost:
    """Seconds that a training step takes for one process's share of a batch, and its peak memory."""

    views: int  # in the share
    load: float  # decoding and augmentation, in one process
    trunk: float
    branches: float  # forward, objective, backward, update
    memory: int  # peak in bytes, of the GPU if there is one

    def step_seconds(self, *, workers: int, cached: bool) -> float:
        """Return the time of a training step; with cached views, neither files nor the trunk are needed."""
        return self.branches if cached else _overlapped(self.load, self.trunk + self.branches, workers=workers)

    def cache_seconds(self, views: int, *, workers: int) -> float:
        """Return the time to compute the trunk on `views` views."""
        return views / self.views * _overlapped(self.load, self.trunk, workers=workers)


@kept_memory()
def measure_step(
    state: TrainState, setup: Setup, plan: BatchPlan, *, processes: int = 1, slow: float = _SLOW_STEP_SECONDS
) -> StepCost:
    """Train a copy of `state` for two steps on the first real batches; one step if it takes longer than `slow` seconds.

    Each of several processes trains on its share of a batch, so the time is that of one share.
    """
    model, method, optimizer, precision = deepcopy((state.model, state.method, state.optimizer, state.precision))
    trial = replace(state, model=model, method=method, optimizer=optimizer, precision=precision)
    views, labels = FileViews(setup.manifest.images, setup.config.data), torch.from_numpy(setup.labels)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    model.train()
    resolution = setup.config.data.resolution
    # A first pass, so that preparing the trunk is not timed.
    model.to_maps(model.placed(torch.zeros(1, 3, resolution, resolution, dtype=torch.uint8)))
    # Views seed the default generator: its state is restored afterwards.
    with torch.random.fork_rng(devices=[]):
        for requests in islice(plan, TIMED_STEPS):
            requests = requests[::processes]
            rows = torch.tensor([request.index for request in requests])
            labelled, unlabelled = rows[rows < len(labels)], rows[rows >= len(labels)] - len(labels)
            start = _now()
            inputs = torch.cat(default_collate([views[request] for request in requests]))
            loaded = _now()
            with precision.autocast(model.trunk.mean.device):
                maps = model.to_maps(model.placed(inputs))
            through_trunk = _now()
            train_step(trial, [*maps.chunk(2)], labels[labelled], rows=unlabelled, ramp=1.0, generator=generator_for(0))
            end = _now()
            if end - start > slow:
                break
    return StepCost(len(inputs), loaded - start, through_trunk - loaded, end - through_trunk, _peak_memory())


def _overlapped(load: float, compute: float, *, workers: int) -> float:
    """Return seconds per batch while `workers` processes load ahead: loaders, computation or cores are the limit."""
    if not workers:
        return load + compute
    threads = 1 if torch.cuda.is_available() else torch.get_num_threads()
    work = load + threads * compute
    return max(load / workers, compute, work / max(threads, len(os.sched_getaffinity(0))))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_memory()
