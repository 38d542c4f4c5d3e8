"""Manifest of a run: its images, their labels, and true classes that only reports may use."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ncd_serve.errors import DataError, did_you_mean
from ncd_serve.inputs.images import images_in
from ncd_serve.text import check_name, printable

UNLABELLED_TRAIN = "unlabelled-train"  # images of discovery; ACC on them is transductive
KNOWN_TEST = "known-test"
NOVEL_TEST = "novel-test"  # held out; ACC on it is inductive


@dataclass(frozen=True)
class Manifest:
    """Images of a run.

    `truth` holds true novel classes if a dataset has them. It is for reports alone. Training uses `labelled`,
    `unlabelled` and `known_classes`.
    """

    name: str
    labelled: list[tuple[Path, int]]
    unlabelled: list[Path]
    known_classes: list[str]
    novel_classes: int | None
    truth: list[int] | None = None
    novel_names: tuple[str, ...] = ()  # names of the numbers in `truth` and `novel_test`, if a dataset has them
    known_test: tuple[tuple[Path, int], ...] = ()
    novel_test: tuple[tuple[Path, int], ...] = ()
    published: bool = False  # a published split: every readable image stays in it
    # True: unlabelled images show known classes too, which come first in the numbers of `truth` and `novel_test`. Of a
    # CSV file, this follows from true classes, so that only reports may use it.
    open_world: bool = False
    notes: tuple[str, ...] = ()  # remarks for the user before training

    @property
    def images(self) -> list[Path]:
        """All training images, labelled first."""
        return [path for path, _ in self.labelled] + self.unlabelled

    @property
    def fingerprint(self) -> str:
        """Hash of the training images' names and labels in their order; independent of their folder."""
        labels = [label for _, label in self.labelled] + [-1] * len(self.unlabelled)
        digest = sha256()
        for path, label in zip(self.images, labels, strict=True):
            digest.update(os.fsencode(f"{label} {path.name}\n"))
        return digest.hexdigest()[:20]

    def check(self, clusters: int) -> None:
        """Raise DataError if training on these images is impossible, before any heavy work."""
        if len(self.known_classes) == 1:
            raise DataError("there is only one known class", hint="label images of at least two classes")
        if clusters > len(self.unlabelled):
            raise DataError(
                f"{clusters} clusters, but only {len(self.unlabelled)} unlabelled images",
                hint="give a smaller --novel-classes",
            )
        sizes = Counter(label for _, label in self.labelled)
        small = [name for number, name in enumerate(self.known_classes) if sizes[number] < 2]
        if small:
            raise DataError(f"known class '{small[0]}' has fewer than 2 images", hint="add images or remove the folder")


def class_folders(root: Path) -> dict[str, list[Path]]:
    """Return images by the name of their class folder, sorted; DataError if there are none."""
    if not root.is_dir():
        raise DataError(f"no such folder: {root}", hint="check the path")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {_class_name(folder): images for folder in folders if (images := images_in(folder))}
    if not found:
        raise DataError(
            f"no images in class folders below {root}", hint="put the images of each class into a folder of its own"
        )
    return found


def _class_name(folder: Path) -> str:
    try:
        return check_name(folder.name)
    except ValueError as error:
        raise DataError(f"class folder '{printable(folder.name)}': {error}", hint="rename the folder") from None


def from_folders(labelled: Path, unlabelled: Path) -> Manifest:
    """Return the manifest of the user's own images: class folders, and a folder (flat or nested) without labels."""
    classes = class_folders(labelled)
    return Manifest(
        name=printable(unlabelled.resolve().name),
        labelled=[(path, number) for number, paths in enumerate(classes.values()) for path in paths],
        unlabelled=_images_below(unlabelled),
        known_classes=list(classes),
        novel_classes=None,
    )


def from_unlabelled(folders: list[Path]) -> Manifest:
    """Return a manifest of all images below some folders, none of them labelled."""
    images = [path for folder in folders for path in _images_below(folder)]
    name = printable(folders[-1].resolve().name)
    return Manifest(name, labelled=[], unlabelled=images, known_classes=[], novel_classes=None)


def _images_below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}", hint="check the path")
    images = images_in(folder)
    if not images:
        raise DataError(f"no images in {folder}", hint="put the unlabelled images there")
    return images


_REQUIRED = ("path", "label")
_COLUMNS = (*_REQUIRED, "split", "true_label")
_EXTRA_CELLS = "more"  # key under which the reader puts cells beyond the last column


class _Row(NamedTuple):
    line: int
    path: Path
    label: str
    split: str
    true_label: str


def from_csv(file: Path) -> Manifest:
    """Read the manifest from a CSV file; errors name the line."""
    rows = list(_rows(file))
    training, test = ([row for row in rows if row.split == split] for split in ("train", "test"))
    labelled, unlabelled = [row for row in training if row.label], [row for row in training if not row.label]
    if not labelled or not unlabelled:
        raise DataError(
            f"{file} has {len(labelled)} labelled and {len(unlabelled)} unlabelled training images",
            hint="list both kinds: an empty label marks an unlabelled image",
        )
    known, true = _numbers({row.label for row in labelled}), _true_classes(file, unlabelled)
    mixed = not true.isdisjoint(known)
    # In an open world, known classes come first in the numbers of true classes.
    first = known if mixed else {}
    novel = {**first, **{name: len(first) + number for name, number in _numbers(true - first.keys()).items()}}
    known_test, novel_test = _test_rows(file, test, known=known, novel=novel)
    return Manifest(
        name=printable(file.stem),
        labelled=[(row.path, known[row.label]) for row in labelled],
        unlabelled=[row.path for row in unlabelled],
        known_classes=list(known),
        novel_classes=None,
        truth=[novel[row.true_label] for row in unlabelled] if novel else None,
        novel_names=tuple(novel),
        open_world=mixed,
        known_test=tuple(known_test),
        novel_test=tuple(novel_test),
    )


def _rows(file: Path) -> Iterator[_Row]:
    try:
        # Spreadsheets begin a file with a byte order mark.
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {error}", hint="save it as CSV in UTF-8") from None
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey=_EXTRA_CELLS, restval="")
    try:
        _check_columns(file, list(reader.fieldnames or ()))
        for cells in reader:
            yield _row(file, reader.line_num, cells)
    except csv.Error as error:
        raise DataError(f"{file} line {reader.line_num + 1}: {error}", hint="correct or remove that line") from None


def _row(file: Path, line: int, cells: dict[str, str]) -> _Row:
    where = f"{file} line {line}"
    if _EXTRA_CELLS in cells:
        raise DataError(f"{where} has more cells than columns", hint="put quotes around cells that hold commas")
    row = {column: cells.get(column, "").strip() for column in _COLUMNS}
    if not row["path"]:
        raise DataError(f"{where} has no path", hint="give the path of an image, or remove the line")
    split = row["split"] or "train"
    if split not in ("train", "test"):
        raise DataError(f"{where}: unknown split '{split}'", hint="write train or test")
    if row["label"] and row["true_label"] not in ("", row["label"]):
        raise DataError(f"{where} has two labels", hint="give true_label only if label is empty")
    for label in filter(None, (row["label"], row["true_label"])):
        try:
            check_name(label)
        except ValueError as error:
            raise DataError(f"{where}: label '{printable(label)}': {error}", hint="write another label") from None
    return _Row(line, file.parent / row["path"], row["label"], split, row["true_label"])


def _check_columns(file: Path, columns: list[str]) -> None:
    missing = [column for column in _REQUIRED if column not in columns]
    if missing:
        raise DataError(
            f"{file} has no column '{missing[0]}'", hint=f"the first line must name the columns: {','.join(_COLUMNS)}"
        )
    unknown = [column for column in columns if column not in _COLUMNS]
    if unknown:
        raise DataError(f"{file} has an unknown column '{unknown[0]}'", hint=did_you_mean(unknown[0], _COLUMNS))


def _numbers(names: set[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(sorted(names))}


def _true_classes(file: Path, unlabelled: list[_Row]) -> set[str]:
    """Return the true classes of the unlabelled images; an empty set if no image has one."""
    without = [row for row in unlabelled if not row.true_label]
    if len(without) in (0, len(unlabelled)):
        return {row.true_label for row in unlabelled} - {""}
    raise DataError(
        f"{file} line {without[0].line} has no true_label, but other lines have one",
        hint="give true_label for all unlabelled images, or for none",
    )


def _test_rows(
    file: Path, rows: list[_Row], *, known: dict[str, int], novel: dict[str, int]
) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    known_test, novel_test = [], []
    for row in rows:
        label = row.label or row.true_label
        if label in known:
            known_test.append((row.path, known[label]))
        elif label in novel:
            novel_test.append((row.path, novel[label]))
        else:
            raise DataError(
                f"{file} line {row.line}: no training image has the class '{label}' of this test image",
                hint="give test images a class that is a label or true_label of training images",
            )
    return known_test, novel_test
