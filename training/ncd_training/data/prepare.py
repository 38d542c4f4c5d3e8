"""Preparation of a run: its settings and images, checked before any heavy work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import write_text
from ncd_training.base.run_dir import weights_path
from ncd_training.data.carried import Carried
from ncd_training.data.datasets import load_manifest
from ncd_training.data.manifest import Manifest, from_unlabelled
from ncd_training.data.scan import Findings, load_manifest_of_run, save_manifest, scan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.progress import Progress, Track
    from ncd_training.base.run_dir import RunDir
    from ncd_training.config.schema import OptimConfig, PileKind, TrainConfig
    from ncd_training.data.scan import Mapper

_MIN_PRETRAINING_IMAGES = 8
_MIN_KNOWN_CLASSES = 4  # for an estimate: two to hold back, two to train on
_MIN_UNLABELLED_IMAGES = 4
_MAX_PRINTED_FILES = 10  # skipped files on the console; the run directory's skipped.txt lists all of them


@dataclass(frozen=True)
class Setup:
    """Configuration and images of a run."""

    config: TrainConfig
    manifest: Manifest
    findings: Findings = field(default_factory=Findings)
    carried: Carried | None = None  # None: a first generation

    @property
    def labels(self) -> NDArray[np.int64]:
        """Class numbers of the labelled images."""
        return np.array([label for _, label in self.manifest.labelled], dtype=np.int64)

    @property
    def clusters(self) -> int:
        """Number of clusters to find. Known classes among the unlabelled images count if no head names them."""
        unnamed = self.config.data.pile == "mixed" and self.config.model.heads == "separate"
        return self.novel_classes + (len(self.manifest.known_classes) if unnamed else 0)

    @property
    def novel_classes(self) -> int:
        """Number of novel classes, filled in by `prepare`."""
        assert isinstance(self.config.data.novel_classes, int)
        return self.config.data.novel_classes

    def with_config(self, **sections: object) -> Setup:
        """Return the setup with some sections of its configuration replaced."""
        return replace(self, config=self.config.model_copy(update=sections))

    def with_carried(self, carried: Carried) -> Setup:
        """Return the setup with what the generation before left."""
        return replace(self, carried=carried)

    def keep(self, run: RunDir) -> None:
        """Write the images, and a list of those that were skipped, into a run directory that has none yet."""
        if run.manifest.exists():
            return
        if self.carried is not None:
            self.carried.write(run)
        save_manifest(run.manifest, self.manifest, self.findings.stamps)
        if lines := self.findings.lines():
            write_text(run.skipped, "\n".join(lines) + "\n")


def list_images(config: TrainConfig, *, track: Track) -> Setup:
    """Find the images of a run, and fill in the number of novel classes and the kind of pile; reads no image."""
    if (weights := config.model.weights_file) and not weights.exists():
        weights_path(weights)  # the quickest check comes first
    manifest = load_manifest(config.data, track=track)
    novel = config.data.novel_classes or manifest.novel_classes or "auto"
    # A CSV file's true classes may show that known ones are among the unlabelled images: that is for reports alone.
    named: PileKind = "mixed" if config.data.dataset and manifest.open_world else "novel"
    data = config.data.model_copy(update={"novel_classes": novel})
    config = config.model_copy(update={"data": data})
    if not manifest.known_classes:
        return Setup(without_labels(config), manifest)
    return Setup(with_pile(config, config.data.pile or named), manifest)


def without_labels(config: TrainConfig) -> TrainConfig:
    """Return the configuration for images none of which is labelled: clusters start from features alone."""
    if not config.self_labels.weight:
        raise UsageError(
            "without labelled images, only the recipe own-images finds classes",
            hint="give --labelled DIR, or drop --recipe and --method",
        )
    if config.data.pile == "mixed":
        raise UsageError("--pile mixed needs labelled images of the known classes", hint="give --labelled DIR")
    if config.data.novel_classes == "auto":
        raise UsageError(
            "without labelled images, the number of classes cannot be estimated",
            hint="give --novel-classes N, rather too many than too few: clusters can be merged afterwards",
        )
    update = {
        "loss": config.loss.model_copy(update={"cross_entropy": False}),
        "optim": config.optim.model_copy(update={"labelled_batch": 0}),
    }
    return with_pile(config.model_copy(update=update), "novel")


def with_pile(config: TrainConfig, pile: PileKind) -> TrainConfig:
    """Return the configuration for a kind of pile; clusters that start from features get a head for known classes."""
    heads = config.model.heads
    if pile == "mixed" and (heads == "auto" or (config.self_labels.weight and heads == "separate")):
        heads = "open_world"
    elif pile == "novel" and heads == "auto":
        heads = "separate"
    data, model = config.data.model_copy(update={"pile": pile}), config.model.model_copy(update={"heads": heads})
    return config.model_copy(update={"data": data, "model": model})


def prepare(listed: Setup, *, progress: Progress, mapper: Mapper | None = None) -> Setup:
    """Check every image; DataError if training on them is impossible."""
    config, (manifest, findings) = listed.config, _scanned(listed, progress, mapper)
    if config.data.novel_classes == "auto":
        manifest.check(2)
        _check_estimate(manifest, config.estimate.most)
    optim = split_batch_by_size(config.optim, len(manifest.labelled), len(manifest.unlabelled))
    setup = Setup(config.model_copy(update={"optim": optim}), manifest, findings)
    if config.data.novel_classes != "auto":
        manifest.check(setup.clusters)
    return setup


def reopen(run: RunDir, *, progress: Progress) -> Setup:
    """Return the settings and images of an existing run; DataError if the images have changed."""
    carried = Carried.read(run)
    if carried is not None:
        finish_placing(run, carried)
    config = run.config()
    if run.manifest.is_file():
        return Setup(config, load_manifest_of_run(run.manifest, track=progress.track), carried=carried)
    # An older run without a manifest: list and check its images again.
    if run.made_by == "pretrain":
        setup = prepare_unlabelled(config, progress=progress)
    else:
        setup = prepare(list_images(config, track=progress.track), progress=progress)
    if run.images_digest not in (None, setup.manifest.fingerprint):
        raise images_changed(run)
    return setup


def finish_placing(run: RunDir, carried: Carried) -> None:
    """Put the checkpoint whose clusters got their ids in its place, if this was decided; a killed process may have."""
    if not (carried.changes and run.placed.exists()):
        run.placed.unlink(missing_ok=True)
        return
    config = run.config()
    data = config.data.model_copy(update={"novel_classes": len(carried.ids)})
    run.write_config(config.model_copy(update={"data": data}))
    run.placed.replace(run.checkpoint)


def images_changed(run: RunDir) -> DataError:
    """Return the error for images that have changed since the run was started."""
    return DataError(
        f"the images have changed since {run.path} was started", hint="restore the images, or start another run"
    )


def prepare_unlabelled(config: TrainConfig, *, progress: Progress) -> Setup:
    """Check the images to pretrain on: those of a dataset, or all below the user's folders. Labels are ignored."""
    folders = [folder for folder in (config.data.labelled, config.data.unlabelled) if folder is not None]
    manifest = from_unlabelled(folders) if folders else load_manifest(config.data, track=progress.track)
    manifest, findings = _scanned(Setup(config, manifest), progress, None)
    images, pretrain = len(manifest.images), config.pretrain
    if images < _MIN_PRETRAINING_IMAGES:
        raise DataError(f"{images} images are too few to pretrain on", hint=f"give at least {_MIN_PRETRAINING_IMAGES}")
    # A queue as long as an epoch would hold keys of the query's own image, which must not count as another image.
    sizes = {"batch": min(pretrain.batch, images // 2), "queue": min(pretrain.queue, images // 2)}
    config = config.model_copy(update={"pretrain": pretrain.model_copy(update=sizes)})
    return Setup(config, manifest, findings)


def check_processes(optim: OptimConfig, processes: int) -> None:
    """Raise UsageError when a batch cannot be split evenly over the training processes."""
    batch = optim.labelled_batch + optim.unlabelled_batch
    if batch % processes:
        raise UsageError(
            f"a batch of {batch} images cannot be split over {processes} processes",
            hint="change optim.labelled_batch or optim.unlabelled_batch",
        )


def split_batch_by_size(optim: OptimConfig, labelled: int, unlabelled: int) -> OptimConfig:
    """Return batch sizes in the proportion of labelled to unlabelled images, if `batch_by_size` is set."""
    if not optim.batch_by_size:
        return optim
    batch = optim.labelled_batch + optim.unlabelled_batch
    known = min(batch - 2, max(1, round(batch * labelled / (labelled + unlabelled))))
    return optim.model_copy(update={"labelled_batch": known, "unlabelled_batch": batch - known, "batch_by_size": False})


def _check_estimate(manifest: Manifest, most: int | None) -> None:
    known, unlabelled = len(manifest.known_classes), len(manifest.unlabelled)
    if known < _MIN_KNOWN_CLASSES:
        raise DataError(
            f"{known} known classes are too few to estimate the number of novel classes",
            hint=f"label images of at least {_MIN_KNOWN_CLASSES} classes, or train with --novel-classes N",
        )
    if unlabelled < _MIN_UNLABELLED_IMAGES:
        raise DataError(
            f"{unlabelled} unlabelled images are too few to estimate the number of their classes",
            hint=f"give at least {_MIN_UNLABELLED_IMAGES}, or train with --novel-classes N",
        )
    if most is not None and most > unlabelled:
        raise DataError(f"{most} clusters, but only {unlabelled} unlabelled images", hint="give a smaller --most")


def _scanned(listed: Setup, progress: Progress, mapper: Mapper | None) -> tuple[Manifest, Findings]:
    strict = listed.config.data.strict
    manifest, findings = scan(listed.manifest, track=progress.track, strict=strict, mapper=mapper)
    for line in findings.lines(_MAX_PRINTED_FILES):
        progress.say(line, style="yellow")
    return manifest, findings
