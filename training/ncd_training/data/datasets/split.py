"""Published splits, shipped as data: the known and the novel classes of each dataset."""

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
    """Class names of one split in the order of their numbers; `images` are published counts, if there are any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    note: str = ""
    known: tuple[str, ...] = ()
    novel: tuple[str, ...]
    images: dict[str, int] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes, known classes first: the order of archives whose classes have numbers."""
        return self.known + self.novel

    def remarks(self, manifest: Manifest) -> tuple[str, ...]:
        """Return notes for the user: the split's own, and differences of this copy from the published counts."""
        found = _counts(manifest)
        other = [
            f"{part} {found[part]:,} instead of {count:,}"
            for part, count in self.images.items()
            if found[part] != count
        ]
        differs = [f"the numbers of images differ from the published split: {', '.join(other)}"] if other else []
        return tuple(filter(None, [self.note, *differs]))


def load_split(name: str) -> Split:
    """Load the split of a dataset."""
    return Split.model_validate(_read(name))


def load_classes(name: str) -> tuple[str, ...]:
    """Load a list of classes that a split is made from."""
    return tuple(_read(name)["classes"])


def _read(name: str) -> dict[str, Any]:
    """Read a split file; DataError if it is not the released one."""
    file = f"{name}.json"
    content = (_FOLDER / file).read_bytes()
    released = (_FOLDER / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    if f"{hashlib.sha256(content).hexdigest()}  {file}" not in released:
        raise DataError(
            f"the split file {_FOLDER / file} was changed after its release", hint="install ncd-serve again"
        )
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
