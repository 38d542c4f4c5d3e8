"""The published splits, shipped as data: which classes are known and which are novel."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict

from ncd_serve.errors import DataError
from ncd_training.data.manifest import Manifest

_FOLDER = files("ncd_training.data.datasets") / "splits"


class Split(BaseModel):
    """Class names of one split in the order that numbers them; `images` are the published counts, where known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    note: str = ""
    known: tuple[str, ...] = ()
    novel: tuple[str, ...]
    images: dict[str, int] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes, known ones first: the order of the archives whose classes have numbers."""
        return self.known + self.novel

    def remarks(self, manifest: Manifest) -> tuple[str, ...]:
        """What a user should know: the split's note, and where this copy of the images differs from the published."""
        found = _counts(manifest)
        other = [
            f"{part} {found[part]:,} instead of {count:,}"
            for part, count in self.images.items()
            if found[part] != count
        ]
        differs = (
            [f"this copy has other numbers of images than the published split: {', '.join(other)}"] if other else []
        )
        return tuple(filter(None, [self.note, *differs]))


def load_split(name: str) -> Split:
    """The split of a dataset."""
    return Split.model_validate(_read(name))


def load_classes(name: str) -> tuple[str, ...]:
    """A plain list of classes that a split is made from."""
    return tuple(_read(name)["classes"])


def _read(name: str) -> dict[str, Any]:
    """A split file, unless it is not the one that was released."""
    file = f"{name}.json"
    content = (_FOLDER / file).read_bytes()
    released = (_FOLDER / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    if f"{hashlib.sha256(content).hexdigest()}  {file}" not in released:
        raise DataError(f"the split file {_FOLDER / file} was changed", hint="install ncd-serve again")
    found: dict[str, Any] = json.loads(content)
    return found


def _counts(manifest: Manifest) -> dict[str, int]:
    labelled, unlabelled = len(manifest.labelled), len(manifest.unlabelled)
    known_test, novel_test = len(manifest.known_test), len(manifest.novel_test)
    return {
        "labelled": labelled,
        "unlabelled": unlabelled,
        "known-test": known_test,
        "novel-test": novel_test,
        "train": labelled + unlabelled,
        "test": known_test + novel_test,
    }
