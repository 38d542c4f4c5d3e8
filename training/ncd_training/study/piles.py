"""Realistic piles of unlabelled images, drawn from a dataset whose classes are all known: the cells of `compare`."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ncd_serve.errors import DataError, UsageError, did_you_mean
from ncd_serve.files import write_text
from ncd_training.data.manifest import Manifest, from_unlabelled
from ncd_training.model.predict import Ids

CELLS = {
    "clean": "novel classes only, equally many images each, their number given",
    "tail": "novel classes only, sizes that fall 20:1, their number given",
    "mixed": "half of the unlabelled images show known classes; the number of novel ones is given",
    "unknown": "as clean, without the number",
    "wild": "known classes, sizes that fall 20:1, no number, 5% foreign images",
}
FOREIGN = -1  # class of an image that belongs to another dataset
_FOREIGN_NAME = "foreign"
_RATIO, _FOREIGN_SHARE = 20, 0.05


class Cell(NamedTuple):
    """Kind of pile by its name in CELLS, and images of other things."""

    name: str
    foreign: tuple[Path, ...] = ()

    @property
    def line(self) -> str:
        """Sentence about the pile."""
        return f"Cell {self.name}: {CELLS[self.name]}; drawn anew for each seed."


class Pile(NamedTuple):
    """Rows of a cell among the images of a dataset, labelled and unlabelled."""

    labelled: Ids
    unlabelled: Ids


def draw_pile(cell: str, classes: Ids, *, known: int, seed: int) -> Pile:
    """Draw the images of a cell by their `classes`, known ones first; foreign images have class FOREIGN."""
    rng, number_of_classes = np.random.default_rng([seed, list(CELLS).index(cell)]), int(classes.max()) + 1
    mixed, falling = cell in ("mixed", "wild"), cell in ("tail", "wild")
    labelled, unlabelled = list[int](), list[int]()
    for place, number in enumerate(rng.permutation(np.arange(known, number_of_classes))):
        rows = rng.permutation(np.flatnonzero(classes == number))
        share = _RATIO ** (-place / (number_of_classes - known - 1)) if falling else 1.0
        unlabelled += rows[: max(2, round(share * len(rows)))].tolist()
    each = round(len(unlabelled) / known)
    for number in range(known):
        rows = rng.permutation(np.flatnonzero(classes == number))
        hidden = min(len(rows) // 2, max(1, each)) if mixed else 0
        unlabelled += rows[:hidden].tolist()
        labelled += rows[hidden:].tolist()
    if cell == "wild":
        foreign = np.flatnonzero(classes == FOREIGN)
        unlabelled += rng.permutation(foreign)[: round(_FOREIGN_SHARE * len(unlabelled))].tolist()
    return Pile(np.array(labelled), np.array(unlabelled))


def chosen_cell(name: str, foreign: Path | None) -> Cell:
    """Return a cell by its name; UsageError for an unknown one, or if foreign images are missing or not needed."""
    if name not in CELLS:
        raise UsageError(f"unknown cell '{name}'", hint=did_you_mean(name, CELLS))
    if (name == "wild") != (foreign is not None):
        raise UsageError("the cell wild, and no other, has foreign images", hint="give --foreign DIR with --cell wild")
    return Cell(name, tuple(from_unlabelled([foreign]).unlabelled) if foreign else ())


def write_pile(cell: Cell, manifest: Manifest, *, seed: int, folder: Path) -> dict[str, Any]:
    """Write the images of a cell as `<cell>-<seed>.csv`, and return the settings of a run on them."""
    if manifest.truth is None:
        raise DataError("a cell needs the true classes of all images", hint="name a dataset, or give true_label")
    known, images = len(manifest.known_classes), [*manifest.images, *cell.foreign]
    first = 0 if manifest.open_world else known
    true = [first + number for number in manifest.truth]
    classes = np.array([*(label for _, label in manifest.labelled), *true, *[FOREIGN] * len(cell.foreign)])
    pile = draw_pile(cell.name, classes, known=known, seed=seed)
    names = [*manifest.known_classes, *manifest.novel_names[known - first :], _FOREIGN_NAME]
    stream = io.StringIO()
    lines = csv.writer(stream)
    lines.writerow(["path", "label", "true_label"])
    lines.writerows([images[row].absolute(), names[classes[row]], ""] for row in pile.labelled)
    lines.writerows([images[row].absolute(), "", names[classes[row]]] for row in pile.unlabelled)
    file = folder / "piles" / f"{cell.name}-{seed}.csv"
    write_text(file, stream.getvalue())
    return {
        **dict.fromkeys(("dataset", "root", "labelled", "unlabelled")),
        "manifest": file.absolute(),
        "pile": "mixed" if cell.name in ("mixed", "wild") else "novel",
        "novel_classes": "auto" if cell.name in ("unknown", "wild") else len(names) - 1 - known,
    }
