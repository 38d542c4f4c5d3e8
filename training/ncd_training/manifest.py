"""Which images there are, which of them are labelled, and what only a report may know."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ncd_serve.errors import DataError
from ncd_serve.images import images_in

UNLABELLED_TRAIN = "unlabelled-train"  # what is discovered; ACC on it is transductive
KNOWN_TEST = "known-test"
NOVEL_TEST = "novel-test"  # held out; ACC on it is inductive


@dataclass(frozen=True)
class Manifest:
    """The images of a run.

    `truth` holds true novel classes where a dataset has them. It is for reports alone and is kept apart from what
    training sees: `labelled`, `unlabelled` and `known_classes`.
    """

    name: str
    labelled: list[tuple[Path, int]]
    unlabelled: list[Path]
    known_classes: list[str]
    novel_classes: int | None
    truth: list[int] | None = None
    novel_names: tuple[str, ...] = ()  # of the numbers in `truth` and `novel_test`, where a dataset names them
    known_test: tuple[tuple[Path, int], ...] = ()
    novel_test: tuple[tuple[Path, int], ...] = ()
    published: bool = False  # the split is a published one: nothing that can be read is taken out of it
    open_world: bool = False  # known classes are in the pile too: `truth` and `novel_test` count them first
    notes: tuple[str, ...] = ()  # what the user should know about these images before training on them

    @property
    def images(self) -> list[Path]:
        """All training images, labelled first."""
        return [path for path, _ in self.labelled] + self.unlabelled

    @property
    def fingerprint(self) -> str:
        """Of the training images' names and labels in their order, wherever their folder is."""
        labels = [label for _, label in self.labelled] + [-1] * len(self.unlabelled)
        digest = sha256()
        for path, label in zip(self.images, labels, strict=True):
            digest.update(os.fsencode(f"{label} {path.name}\n"))
        return digest.hexdigest()[:20]

    def check(self, clusters: int) -> None:
        """Raise DataError for what cannot be trained on, before any heavy work."""
        if len(self.known_classes) < 2:
            raise DataError("there is only one known class", hint="labelled images need at least two class folders")
        if clusters > len(self.unlabelled):
            raise DataError(
                f"{clusters} clusters, but only {len(self.unlabelled)} unlabelled images",
                hint="ask for fewer with --novel-classes",
            )
        sizes = Counter(label for _, label in self.labelled)
        small = [name for number, name in enumerate(self.known_classes) if sizes[number] < 2]
        if small:
            raise DataError(f"known class '{small[0]}' has fewer than 2 images", hint="add images or remove the folder")


def class_folders(root: Path) -> dict[str, list[Path]]:
    """Images by the name of the class folder they are in, sorted; raises DataError when there are none."""
    if not root.is_dir():
        raise DataError(f"no such folder: {root}", hint="check the path")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {folder.name: images for folder in folders if (images := images_in(folder))}
    if not found:
        raise DataError(f"no images in class folders below {root}", hint="it needs one folder of images for each class")
    return found


def from_folders(labelled: Path, unlabelled: Path) -> Manifest:
    """The user's own images: class folders, and a folder (flat or nested) of images that nobody named."""
    classes = class_folders(labelled)
    return Manifest(
        name=unlabelled.resolve().name,
        labelled=[(path, number) for number, paths in enumerate(classes.values()) for path in paths],
        unlabelled=_images_below(unlabelled),
        known_classes=list(classes),
        novel_classes=None,
    )


def pile(folders: list[Path]) -> Manifest:
    """All images below some folders, none of them labelled."""
    images = [path for folder in folders for path in _images_below(folder)]
    return Manifest(folders[-1].resolve().name, labelled=[], unlabelled=images, known_classes=[], novel_classes=None)


def _images_below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}", hint="check the path")
    images = images_in(folder)
    if not images:
        raise DataError(f"no images in {folder}", hint="put the images to be grouped there")
    return images
