"""The named datasets: where their files are and which classes are novel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError, UsageError, did_you_mean
from ncd_training import glyphs
from ncd_training.config import DataConfig
from ncd_training.manifest import Manifest, class_folders, from_folders

if TYPE_CHECKING:
    from collections.abc import Callable

Labelled = list[tuple[Path, int]]


def load_manifest(data: DataConfig) -> Manifest:
    """The images that a configuration names, or an error that says what is missing."""
    if data.labelled and data.unlabelled:
        return from_folders(data.labelled, data.unlabelled)
    if data.dataset is None:
        raise UsageError("no images to train on", hint="give --dataset NAME, or --labelled DIR and --unlabelled DIR")
    if data.dataset not in DATASETS:
        raise UsageError(f"unknown dataset '{data.dataset}'", hint=did_you_mean(data.dataset, DATASETS))
    return DATASETS[data.dataset](data.root)


def _glyphs(root: Path | None) -> Manifest:
    root = glyphs.write_glyphs(root or Path("data") / "glyphs")
    train, test = class_folders(root / "train"), class_folders(root / "test")
    return _split(
        "glyphs",
        list(glyphs.KNOWN),
        list(glyphs.NOVEL),
        train={name: train[name] for name in glyphs.KNOWN + glyphs.NOVEL},
        test={name: test[name] for name in glyphs.KNOWN + glyphs.NOVEL},
    )


def _cub200(root: Path | None) -> Manifest:
    """Caltech-UCSD Birds 200-2011 in its official layout: classes 1-160 are known, 161-200 novel."""
    root = _existing(root, default="CUB_200_2011", name="cub200")
    paths = _indexed(root / "images.txt")
    labels = _indexed(root / "image_class_labels.txt")
    is_train = _indexed(root / "train_test_split.txt")
    names = list(_indexed(root / "classes.txt").values())
    splits: dict[str, dict[str, list[Path]]] = {part: {name: [] for name in names} for part in ("train", "test")}
    for number, path in paths.items():
        part = "train" if is_train[number] == "1" else "test"
        splits[part][names[int(labels[number]) - 1]].append(root / "images" / path)
    return _split("cub200", names[:160], names[160:], **splits)


DATASETS: dict[str, Callable[[Path | None], Manifest]] = {"glyphs": _glyphs, "cub200": _cub200}


def _split(
    name: str, known: list[str], novel: list[str], *, train: dict[str, list[Path]], test: dict[str, list[Path]]
) -> Manifest:
    """A manifest from images by class, where the true novel classes are known and set apart."""
    unlabelled = _numbered(train, novel)
    return Manifest(
        name=name,
        labelled=_numbered(train, known),
        unlabelled=[path for path, _ in unlabelled],
        known_classes=known,
        novel_classes=len(novel),
        truth=[label for _, label in unlabelled],
        novel_names=tuple(novel),
        known_test=tuple(_numbered(test, known)),
        novel_test=tuple(_numbered(test, novel)),
    )


def _numbered(images: dict[str, list[Path]], names: list[str]) -> Labelled:
    return [(path, number) for number, name in enumerate(names) for path in images[name]]


def _existing(root: Path | None, *, default: str, name: str) -> Path:
    root = root or Path("data") / default
    if not root.is_dir():
        raise DataError(
            f"dataset '{name}' is not at {root}",
            hint=f"unpack its official archive there, or give --data-root {default}",
        )
    return root


def _indexed(path: Path) -> dict[str, str]:
    """Lines of `key value` as the CUB archive has them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="the archive's own files are needed") from None
    return dict(line.split(" ", 1) for line in lines if line.strip())
