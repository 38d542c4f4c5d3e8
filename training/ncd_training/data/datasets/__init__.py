"""Sources of images: the named datasets, the user's own folders, or a CSV file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ncd_serve import progress
from ncd_serve.errors import UsageError, did_you_mean
from ncd_training.config.schema import DataConfig
from ncd_training.data.datasets.archives import Request
from ncd_training.data.datasets.cifar import cifar10, cifar100
from ncd_training.data.datasets.fine_grained import aircraft, cub200, stanford_cars
from ncd_training.data.datasets.glyphs import glyphs
from ncd_training.data.datasets.imagenet import imagenet, imagenet100, imagenet100_open
from ncd_training.data.manifest import Manifest, from_csv, from_folders, from_unlabelled


class Named(NamedTuple):
    """Dataset with a name: its loader, the names of its official archives, and other common names."""

    load: Callable[[Request], Manifest]
    archive: str = ""
    also: tuple[str, ...] = ()


_IMAGENET = "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, one folder for each class in train and val"
DATASETS: dict[str, Named] = {
    "aircraft": Named(aircraft, "fgvc-aircraft-2013b.tar.gz", ("fgvc", "fgvc-aircraft", "fgvcaircraft", "planes")),
    "cifar10": Named(cifar10, "cifar-10-python.tar.gz or cifar-10-binary.tar.gz"),
    "cifar100": Named(cifar100, "cifar-100-python.tar.gz or cifar-100-binary.tar.gz"),
    "cub200": Named(cub200, "CUB_200_2011.tgz", ("birds", "cub", "cub-200-2011")),
    "glyphs": Named(glyphs),
    "imagenet-a": Named(imagenet, _IMAGENET, ("ilsvrc", "imagenet", "imagenet1k")),
    "imagenet-b": Named(imagenet, _IMAGENET),
    "imagenet-c": Named(imagenet, _IMAGENET),
    "imagenet100": Named(imagenet100, _IMAGENET),
    "imagenet100-open25": Named(partial(imagenet100_open, known=25), _IMAGENET),
    "imagenet100-open50": Named(partial(imagenet100_open, known=50), _IMAGENET),
    "stanford-cars": Named(
        stanford_cars,
        "cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat, all in stanford_cars",
        ("cars", "cars196", "scars", "stanfordcars"),
    ),
}


def load_manifest(data: DataConfig, *, track: progress.Track = progress.silent) -> Manifest:
    """Return the manifest of the images that a configuration names; an error if they are missing."""
    if data.manifest:
        return from_csv(data.manifest)
    if data.labelled and not data.unlabelled:
        raise UsageError("no unlabelled images to discover classes in", hint="add --unlabelled DIR")
    if data.unlabelled:
        return from_folders(data.labelled, data.unlabelled) if data.labelled else from_unlabelled([data.unlabelled])
    if data.dataset is None:
        raise UsageError(
            "no images to train on",
            hint="give --dataset NAME, or --labelled DIR and --unlabelled DIR, or --manifest FILE.csv",
        )
    if data.dataset not in DATASETS:
        raise UsageError(f"unknown dataset '{data.dataset}'", hint=_near(data.dataset))
    named = DATASETS[data.dataset]
    return named.load(Request(name=data.dataset, root=data.root, archive=named.archive, track=track))


def _near(word: str) -> str:
    word = word.casefold().replace("_", "-")
    meant = [name for name, named in DATASETS.items() if word in named.also]
    return did_you_mean(meant[0] if meant else word, DATASETS)
