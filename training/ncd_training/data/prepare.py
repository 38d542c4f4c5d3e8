"""Settings and images of a run, both checked before anything heavy is done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import write_text
from ncd_training.base.run_dir import weights_path
from ncd_training.data.datasets import load_manifest
from ncd_training.data.manifest import Manifest, pile
from ncd_training.data.scan import Findings, load_manifest_of_run, save_manifest, scan

if TYPE_CHECKING:
    from ncd_serve.progress import Progress, Track
    from ncd_training.base.run_dir import RunDir
    from ncd_training.config.schema import OptimConfig, TrainConfig
    from ncd_training.data.scan import Mapper

_FEWEST_IMAGES = 8  # to pretrain on
_FEWEST_KNOWN = 4  # classes for an estimate: two to hold back, two to train on
_FEWEST_UNLABELLED = 4
_SHOWN_FILES = 10  # skipped files on the console; the run directory's skipped.txt lists them all


@dataclass(frozen=True)
class Setup:
    """A configuration with its images."""

    config: TrainConfig
    manifest: Manifest
    findings: Findings = field(default_factory=Findings)

    @property
    def labels(self) -> list[int]:
        """Class numbers of the labelled images."""
        return [label for _, label in self.manifest.labelled]

    @property
    def clusters(self) -> int:
        """Number of clusters to find. Known classes in the pile count where no head knows them by name."""
        unnamed = self.manifest.open_world and self.config.model.heads == "separate"
        return self.novel_classes + (len(self.manifest.known_classes) if unnamed else 0)

    @property
    def novel_classes(self) -> int:
        """Number of novel classes, filled in by `prepare`."""
        assert isinstance(self.config.data.novel_classes, int)
        return self.config.data.novel_classes

    def with_config(self, **sections: object) -> Setup:
        """Return the setup with other sections of its configuration."""
        return replace(self, config=self.config.model_copy(update=sections))

    def keep(self, run: RunDir) -> None:
        """Write the images, and a list of those that were skipped, into a run directory that has none yet."""
        if run.manifest.exists():
            return
        save_manifest(run.manifest, self.manifest, self.findings.stamps)
        if lines := self.findings.lines():
            write_text(run.skipped, "\n".join(lines) + "\n")


def list_images(config: TrainConfig, *, track: Track) -> Setup:
    """Find the images of a run and fill in the number of novel classes; reads no image."""
    if config.model.weights is not None:
        weights_path(config.model.weights)  # the quickest check comes first
    manifest = load_manifest(config.data, track=track)
    novel = config.data.novel_classes or manifest.novel_classes
    if novel is None:
        raise UsageError(
            "the number of novel classes is not known for these images",
            hint="give --novel-classes N, or auto to estimate it",
        )
    data = config.data.model_copy(update={"novel_classes": novel})
    return Setup(config.model_copy(update={"data": data}), manifest)


def prepare(listed: Setup, *, progress: Progress, mapper: Mapper | None = None) -> Setup:
    """Look at every image, and raise DataError for what cannot be trained on."""
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
    """Return the settings and images of an existing run; other images than it was started with are an error."""
    config = run.config()
    if run.manifest.is_file():
        return Setup(config, load_manifest_of_run(run.manifest, track=progress.track))
    # Runs made before runs kept their images: they are listed and looked at again, and then kept.
    if run.made_by == "pretrain":
        setup = prepare_unlabelled(config, progress=progress)
    else:
        setup = prepare(list_images(config, track=progress.track), progress=progress)
    if run.images_digest not in (None, setup.manifest.fingerprint):
        raise images_changed(run)
    return setup


def images_changed(run: RunDir) -> DataError:
    """Return the error for images that are not those of the run."""
    return DataError(
        f"the images have changed since {run.path} was started", hint="put them back, or start another run"
    )


def prepare_unlabelled(config: TrainConfig, *, progress: Progress) -> Setup:
    """Look at the images to pretrain on: those of a dataset, or all below the user's folders. Labels do not matter."""
    folders = [folder for folder in (config.data.labelled, config.data.unlabelled) if folder is not None]
    manifest = pile(folders) if folders else load_manifest(config.data, track=progress.track)
    manifest, findings = _scanned(Setup(config, manifest), progress, None)
    images, pretrain = len(manifest.images), config.pretrain
    if images < _FEWEST_IMAGES:
        raise DataError(f"{images} images are too few to learn from", hint=f"give at least {_FEWEST_IMAGES}")
    # A queue as long as an epoch would hold the key of the very image that a view is compared with others.
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
    """Return batches that hold labelled and unlabelled images in the proportion of the data, if that is asked for."""
    if not optim.batch_by_size:
        return optim
    batch = optim.labelled_batch + optim.unlabelled_batch
    mine = min(batch - 2, max(1, round(batch * labelled / (labelled + unlabelled))))
    return optim.model_copy(update={"labelled_batch": mine, "unlabelled_batch": batch - mine, "batch_by_size": False})


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


def _scanned(listed: Setup, progress: Progress, mapper: Mapper | None) -> tuple[Manifest, Findings]:
    strict = listed.config.data.strict
    manifest, findings = scan(listed.manifest, track=progress.track, strict=strict, mapper=mapper)
    for line in findings.lines(_SHOWN_FILES):
        progress.say(line, style="yellow")
    return manifest, findings
