"""Tools for the loaders of named datasets: find an archive, and make a manifest of its images by class."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_directory
from ncd_serve.inputs.images import images_in
from ncd_serve.progress import Track
from ncd_training.base.parallel import in_threads
from ncd_training.data.datasets.split import Split
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
