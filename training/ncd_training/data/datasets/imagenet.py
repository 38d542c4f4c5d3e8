"""ImageNet-1K (882 known classes, novel lists A, B, C) and the two lists of classes called ImageNet-100."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ncd_serve.errors import DataError
from ncd_training.data.datasets.archives import (
    ByClass,
    Request,
    Split,
    by_folder,
    find,
    load_classes,
    load_split,
    published,
)
from ncd_training.data.manifest import Manifest

_CLASSES = 1000
_WNID = re.compile(r"n\d{8}")
# Names of the task's folder, and of its folder in Kaggle's archive.
_FOLDERS = ("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC")
_KAGGLE_LABELS = "LOC_val_solution.csv"


def imagenet(request: Request) -> Manifest:
    """Return the manifest: one of three lists of 30 novel classes; 882 of the 1000 classes known, in sorted order."""
    folder = _find(request)
    wnids = sorted(entry.name for entry in (folder / "train").iterdir() if _WNID.fullmatch(entry.name))
    if len(wnids) != _CLASSES:
        raise DataError(
            f"{folder / 'train'} holds {len(wnids):,} class folders, but ImageNet-1K has {_CLASSES:,}",
            hint="unpack all of ILSVRC2012_img_train.tar, one folder for each class",
        )
    aside = set(load_classes("imagenet-118"))
    known = tuple(wnid for wnid in wnids if wnid not in aside)
    return _published(request, load_split(request.name).model_copy(update={"known": known}), folder)


def imagenet100(request: Request) -> Manifest:
    """Return the manifest: of CMC's 100 classes, the first 70 in sorted order known, 30 novel. Needs no others."""
    return _published(request, load_split(request.name), _find(request, "imagenet100"))


def imagenet100_open(request: Request, *, known: int) -> Manifest:
    """Return the manifest: ORCA's 100 classes. Half of the images of the first `known` classes are labelled."""
    names = load_classes("imagenet100-open")
    split = Split(source="", known=names[:known], novel=names[known:])
    plain = _published(request, split, _find(request, "imagenet100"))
    labelled, rest = plain.labelled[::2], plain.labelled[1::2]
    assert plain.truth is not None
    return replace(
        plain,
        labelled=labelled,
        unlabelled=[path for path, _ in rest] + plain.unlabelled,
        truth=[label for _, label in rest] + [known + label for label in plain.truth],
        novel_test=tuple((path, known + label) for path, label in plain.novel_test),
        novel_names=names,
        open_world=True,
        notes=(
            *plain.notes,
            "every second image of a known class is labelled, in the order of names; ORCA drew them at random",
            "the unlabelled images contain known classes too: train with --recipe open-world",
        ),
    )


def _find(request: Request, *more: str) -> Path:
    folder, _ = find(request, *((name, "train") for name in (*more, *_FOLDERS)))
    return folder


def _published(request: Request, split: Split, folder: Path) -> Manifest:
    train = by_folder(folder / "train", split.classes, track=request.track)
    if not (folder / "val").is_dir():
        manifest = published(request, split, train=train, test={})
        return replace(manifest, notes=(*manifest.notes, f"no scores on held-out images: there is no {folder / 'val'}"))
    return published(request, split, train=train, test=_validation(request, folder, split.classes))


def _validation(request: Request, folder: Path, names: Sequence[str]) -> ByClass:
    """Return validation images by class: from class folders, or from Kaggle's flat folder and its list of labels."""
    in_folders = by_folder(folder / "val", names, track=request.track)
    if in_folders:
        return in_folders
    labels = next((path for place in (folder, *folder.parents[:3]) if (path := place / _KAGGLE_LABELS).is_file()), None)
    if labels is None:
        raise DataError(
            f"the images in {folder / 'val'} have no labels",
            hint=f"sort them into class folders, or put Kaggle's {_KAGGLE_LABELS} into {folder}",
        )
    with labels.open(encoding="utf-8", newline="") as stream:
        rows = [(row["ImageId"], row["PredictionString"].split()[0]) for row in csv.DictReader(stream)]
    numbers = {name: number for number, name in enumerate(names)}
    images: dict[str, list[Path]] = {name: [] for name in names}
    for image, wnid in sorted(rows):
        if wnid in numbers:
            images[wnid].append(folder / "val" / f"{image}.JPEG")
    return images
