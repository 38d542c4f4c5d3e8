"""What a run needs to know before anything heavy is imported or done: its settings and its images, both checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError, UsageError
from ncd_serve.progress import Progress, Track
from ncd_training.data.datasets import load_manifest
from ncd_training.data.manifest import Manifest, pile
from ncd_training.data.scan import Findings, scan

if TYPE_CHECKING:
    from rich.console import Console

    from ncd_training.config.schema import OptimConfig, TrainConfig


_FEWEST = 8  # images to pretrain on
_FEWEST_KNOWN = 4  # classes for an estimate: two to hold back, two to train on
_FEWEST_UNLABELLED = 4
_SHOWN = 10  # files that cannot be used, on the console; the run directory's skipped.txt lists them all


@dataclass(frozen=True)
class Setup:
    """A configuration with its images looked at, and the place to report to."""

    config: TrainConfig
    manifest: Manifest
    console: Console
    findings: Findings = field(default_factory=Findings)

    @property
    def track(self) -> Track:
        """Progress bars on the console."""
        return Progress(self.console).track

    @property
    def labels(self) -> list[int]:
        """Class numbers of the labelled images."""
        return [label for _, label in self.manifest.labelled]

    @property
    def clusters(self) -> int:
        """How many clusters there are to find. Known classes in the pile count where no head knows them by name."""
        unnamed = self.manifest.open_world and self.config.model.heads == "separate"
        return self.novel_classes + (len(self.manifest.known_classes) if unnamed else 0)

    @property
    def novel_classes(self) -> int:
        """Number of novel classes, filled in by `prepare`."""
        assert isinstance(self.config.data.novel_classes, int)
        return self.config.data.novel_classes


def prepare_images(config: TrainConfig, console: Console) -> Setup:
    """For pretraining: all training images of a dataset, or all below the user's folders. Labels do not matter."""
    folders = [folder for folder in (config.data.labelled, config.data.unlabelled) if folder is not None]
    manifest = pile(folders) if folders else load_manifest(config.data, track=Progress(console).track)
    manifest, findings = _scanned(manifest, config, console)
    images, pretrain = len(manifest.images), config.pretrain
    if images < _FEWEST:
        raise DataError(f"{images} images are too few to learn from", hint=f"give at least {_FEWEST}")
    # A queue as long as an epoch would hold the key of the very image that a view is compared with others.
    sizes = {"batch": min(pretrain.batch, images // 2), "queue": min(pretrain.queue, images // 2)}
    config = config.model_copy(update={"pretrain": pretrain.model_copy(update=sizes)})
    return Setup(config, manifest, console, findings)


def prepare(config: TrainConfig, console: Console) -> Setup:
    """Find and look at everything that a run needs."""
    _check_processes(config.optim)
    manifest = load_manifest(config.data, track=Progress(console).track)
    clusters = config.data.novel_classes or manifest.novel_classes
    if clusters is None:
        raise UsageError("how many novel classes are there?", hint="give --novel-classes N, or auto to estimate it")
    manifest, findings = _scanned(manifest, config, console)
    if clusters == "auto":
        manifest.check(2)
        _check_estimate(manifest, config.estimate.most)
    data = config.data.model_copy(update={"novel_classes": clusters})
    optim = _dealt_out(config.optim, len(manifest.labelled), len(manifest.unlabelled))
    setup = Setup(config.model_copy(update={"data": data, "optim": optim}), manifest, console, findings)
    if clusters != "auto":
        manifest.check(setup.clusters)
    return setup


def _check_processes(optim: OptimConfig) -> None:
    """Each of the processes that torchrun has started gets an equal part of a batch."""
    processes, batch = int(os.environ.get("WORLD_SIZE", "1")), optim.labelled_batch + optim.unlabelled_batch
    if batch % processes:
        raise UsageError(
            f"a batch of {batch} images cannot be split over {processes} processes",
            hint="change optim.labelled_batch or optim.unlabelled_batch",
        )


def _check_estimate(manifest: Manifest, most: int | None) -> None:
    known, unlabelled = len(manifest.known_classes), len(manifest.unlabelled)
    if known < _FEWEST_KNOWN:
        raise DataError(
            f"{known} known classes are too few to estimate the number of novel ones",
            hint=f"label at least {_FEWEST_KNOWN}, or train with --novel-classes N",
        )
    if unlabelled < _FEWEST_UNLABELLED:
        raise DataError(
            f"{unlabelled} unlabelled images are too few to estimate the number of their classes",
            hint=f"give at least {_FEWEST_UNLABELLED}, or train with --novel-classes N",
        )
    if most is not None and most > unlabelled:
        raise DataError(f"{most} clusters, but only {unlabelled} unlabelled images", hint="give a smaller --most")


def _dealt_out(optim: OptimConfig, labelled: int, unlabelled: int) -> OptimConfig:
    """Batches that hold both kinds of images as the data do."""
    if not optim.batch_by_size:
        return optim
    batch = optim.labelled_batch + optim.unlabelled_batch
    mine = min(batch - 2, max(1, round(batch * labelled / (labelled + unlabelled))))
    return optim.model_copy(update={"labelled_batch": mine, "unlabelled_batch": batch - mine, "batch_by_size": False})


def _scanned(manifest: Manifest, config: TrainConfig, console: Console) -> tuple[Manifest, Findings]:
    manifest, findings = scan(manifest, track=Progress(console).track, strict=config.data.strict)
    for line in findings.lines(_SHOWN):
        console.print(line, style="yellow", markup=False, soft_wrap=True, highlight=False)
    return manifest, findings
