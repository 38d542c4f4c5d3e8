"""Fine-grained datasets of birds, cars and aircraft: CUB-200-2011, Stanford-Cars and FGVC-Aircraft."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat

from ncd_serve.errors import DataError
from ncd_serve.preprocess import open_image
from ncd_training.data.datasets.archives import (
    Copy,
    Request,
    Split,
    by_class,
    by_folder,
    check_names,
    find,
    load_split,
    published,
    read_lines,
    write_copies,
)
from ncd_training.data.manifest import Manifest

_MIRROR_FOLDER = "train"  # mirrors have class folders in train/ and test/
_BANNER_PIXELS = 20  # at the bottom of every image of an aircraft, with the photographer's name
_JPEG_QUALITY = 95


def cub200(request: Request) -> Manifest:
    """Return the manifest: classes 1-160 known, 161-200 novel."""
    split = load_split(request.name)
    folder, marker = find(request, ("CUB_200_2011", "images.txt"), ("CUB_200_2011", _MIRROR_FOLDER))
    if marker == _MIRROR_FOLDER:
        return _from_mirror(request, split, folder)
    check_names(list(_indexed(folder / "classes.txt").values()), split, folder / "classes.txt")
    labels, is_train = _indexed(folder / "image_class_labels.txt"), _indexed(folder / "train_test_split.txt")
    parts: dict[str, list[tuple[Path, int]]] = {"0": [], "1": []}
    try:
        for number, path in _indexed(folder / "images.txt").items():
            parts[is_train[number]].append((folder / "images" / path, int(labels[number]) - 1))
    except (KeyError, ValueError) as error:
        raise DataError(f"the lists in {folder} disagree at {error}", hint="unpack the archive again") from None
    train, test = (by_class(parts[part], split, folder / "image_class_labels.txt") for part in ("1", "0"))
    return published(request, split, train=train, test=test)


def stanford_cars(request: Request) -> Manifest:
    """Return the manifest: classes 1-156 of the devkit known, 157-196 novel."""
    split = load_split(request.name)
    meta = "devkit/cars_meta.mat"
    folder, marker = find(request, ("stanford_cars", meta), ("stanford_cars", _MIRROR_FOLDER))
    if marker == _MIRROR_FOLDER:
        return _from_mirror(request, split, folder)
    check_names([str(name) for name in _mat(folder / meta, "class_names")], split, folder / meta)
    train = by_class(_cars(folder / "devkit/cars_train_annos.mat", folder / "cars_train"), split, folder / meta)
    name = "cars_test_annos_withlabels.mat"
    test_labels = next((path for path in (folder / name, folder / "devkit" / name) if path.is_file()), None)
    if test_labels is None:
        manifest = published(request, split, train=train, test={})
        return replace(manifest, notes=(*manifest.notes, f"no scores on held-out images: {folder} has no {name}"))
    test = by_class(_cars(test_labels, folder / "cars_test"), split, test_labels)
    return published(request, split, train=train, test=test)


def aircraft(request: Request) -> Manifest:
    """Return the manifest: the first 80 variants known, the last 20 novel.

    The banner would group images by photographer. Images without the banner are written once, beside the archive, as
    JPEG files of quality 95, so that training, evaluation and serving use the same files.
    """
    split = load_split(request.name)
    folder, _ = find(request, ("fgvc-aircraft-2013b/data", "variants.txt"), ("data", "variants.txt"))
    check_names(read_lines(folder / "variants.txt"), split, folder / "variants.txt")
    numbers = {name: number for number, name in enumerate(read_lines(folder / "variants.txt"))}
    cropped = folder.parent.with_name(f"{folder.parent.name}-cropped")
    parts = {}
    for part in ("trainval", "test"):
        path = folder / f"images_variant_{part}.txt"
        pairs = [(cropped / f"{image}.jpg", numbers.get(name, -1)) for image, name in _indexed(path).items()]
        parts[part] = by_class(pairs, split, path)
    names = [path.name for part in parts.values() for paths in part.values() for path in paths]
    copies: list[Copy] = [(Path(name), partial(_crop_banner, folder / "images" / name)) for name in names]
    write_copies(cropped, lambda: copies, track=request.track)
    return published(request, split, train=parts["trainval"], test=parts["test"])


def _from_mirror(request: Request, split: Split, folder: Path) -> Manifest:
    train, test = (by_folder(folder / part, split.classes, track=request.track) for part in ("train", "test"))
    return published(request, split, train=train, test=test)


def _indexed(path: Path) -> dict[str, str]:
    """Read lines of `key value`; the value may contain spaces."""
    found = {}
    for line in read_lines(path):
        key, _, value = line.partition(" ")
        found[key] = value.strip()
    return found


def _cars(annotations: Path, folder: Path) -> Iterator[tuple[Path, int]]:
    try:
        for row in np.atleast_1d(_mat(annotations, "annotations")):
            yield folder / str(row["fname"]), int(row["class"]) - 1
    except (IndexError, TypeError, ValueError) as error:
        raise DataError(f"{annotations} has no classes: {error}", hint="use the official devkit") from None


def _mat(path: Path, key: str) -> Any:
    """Read a variable of a MATLAB file."""
    try:
        return loadmat(path, squeeze_me=True)[key]
    except (OSError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(f"cannot read {path}: {error}", hint="unpack the whole official archive") from None


def _crop_banner(source: Path, target: Path) -> None:
    try:
        picture = open_image(source)
    except DataError:
        # Copied as it is: the scan before the first epoch reports it.
        if source.is_file():
            shutil.copyfile(source, target)
        return
    picture.crop((0, 0, picture.width, picture.height - _BANNER_PIXELS)).save(target, quality=_JPEG_QUALITY)
