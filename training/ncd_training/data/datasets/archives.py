"""Tools for the loaders of named datasets: find an archive, and make a manifest of its images by class."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_directory
from ncd_serve.inputs.images import images_in
from ncd_serve.progress import Track
from ncd_training.base.processes import in_threads
from ncd_training.data.manifest import Manifest

ByClass = Mapping[str, Sequence[Path]]
# One image in a folder of copies: its path there, and the function that writes it.
Copy = tuple[Path, Callable[[Path], None]]


@dataclass(frozen=True)
class Request:
    """Request for a named dataset: its folder, the names of its official archives, and the progress display."""

    name: str
    root: Path | None
    archive: str
    track: Track


def find(request: Request, *layouts: tuple[str, str]) -> tuple[Path, str]:
    """Return the folder of an unpacked archive and the file that it was recognised by; layouts are (folder, file).

    A root that the user gives may be the folder itself or its parent.
    """
    root = request.root or Path("data")
    for folder, marker in layouts:
        for place in (root / folder, root) if request.root else (root / folder,):
            if (place / marker).exists():
                return place, marker
    wanted = " or ".join(str(Path(folder) / marker) for folder, marker in layouts)
    raise DataError(
        f"dataset '{request.name}' is not at {root}: there is no {wanted}",
        hint=f"unpack its official archive there ({request.archive}), or give its folder with --data-root",
    )


def read_lines(path: Path) -> list[str]:
    """Read the lines of a list that is part of an archive, without empty lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="unpack the whole official archive") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file", hint="unpack the archive again") from None
    return [line.strip() for line in lines if line.strip()]


def check_names(names: Sequence[str], split: Split, path: Path) -> None:
    """Raise DataError unless an archive numbers its classes as the split does."""
    hint = "use the official archive"
    if len(names) != len(split.classes):
        raise DataError(f"{path} names {len(names)} classes, but the split has {len(split.classes)}", hint=hint)
    for number, (name, expected) in enumerate(zip(names, split.classes, strict=True)):
        if plain(name) != plain(expected):
            raise DataError(f"{path}: class {number} is '{name}', but '{expected}' in the split", hint=hint)


def plain(name: str) -> str:
    """Return a class name without case, spaces and punctuation, in which folder names may differ."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def by_class(pairs: Iterable[tuple[Path, int]], split: Split, path: Path) -> ByClass:
    """Group images by class name. Class numbers (from 0) were read from `path`, which errors name."""
    images: dict[str, list[Path]] = {name: [] for name in split.classes}
    for image, number in pairs:
        if not 0 <= number < len(split.classes):
            raise DataError(f"{path}: there is no class {number}", hint="use the official archive")
        images[split.classes[number]].append(image)
    return images


def by_folder(root: Path, names: Sequence[str], *, track: Track) -> ByClass:
    """Group images by class folder; names may differ in case and punctuation, absent classes are omitted."""
    folders = {plain(entry.name): entry for entry in root.iterdir() if entry.is_dir()} if root.is_dir() else {}
    present = [name for name in names if plain(name) in folders]
    return {name: images_in(folders[plain(name)]) for name in track(present, f"listing {root.name}", len(present))}


def published(request: Request, split: Split, *, train: ByClass, test: ByClass) -> Manifest:
    """Return the manifest of a split, with true novel classes for reports."""
    empty = [name for name in split.classes if not train.get(name)]
    if empty:
        raise DataError(
            f"dataset '{request.name}' has no training images of class '{empty[0]}'"
            + (f" and {len(empty) - 1} more" if len(empty) > 1 else ""),
            hint=f"unpack all of its official archive ({request.archive})"
            if request.archive
            else "remove the dataset's folder, so that it is made again",
        )
    unlabelled = numbered(train, split.novel)
    manifest = Manifest(
        name=request.name,
        labelled=numbered(train, split.known),
        unlabelled=[path for path, _ in unlabelled],
        known_classes=list(split.known),
        novel_classes=len(split.novel),
        truth=[label for _, label in unlabelled],
        novel_names=split.novel,
        known_test=tuple(numbered(test, split.known)),
        novel_test=tuple(numbered(test, split.novel)),
        published=True,
    )
    return replace(manifest, notes=split.remarks(manifest))


def numbered(images: ByClass, names: Sequence[str]) -> list[tuple[Path, int]]:
    """Return images with the number of their class in `names`."""
    return [(path, number) for number, name in enumerate(names) for path in images.get(name, ())]


def write_copies(target: Path, list_copies: Callable[[], Sequence[Copy]], *, track: Track) -> None:
    """Write a folder of images made from an archive: once and atomically. Later runs use the same folder."""
    if target.is_dir():
        return
    try:
        with alone(target):
            if not target.is_dir():
                copies = list_copies()
                with atomic_directory(target) as folder:
                    for parent in {path.parent for path, _ in copies}:
                        (folder / parent).mkdir(parents=True, exist_ok=True)
                    done = in_threads(lambda copy: copy[1](folder / copy[0]), copies)
                    for _ in track(done, f"writing {target}", len(copies)):
                        pass
    except OSError as error:
        raise DataError(
            f"cannot write {target}: {error}", hint="make its parent folder writable and free disk space"
        ) from None


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Hold a lock: other processes of the same `torchrun` wait while the first one writes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
