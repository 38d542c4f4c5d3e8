"""What the loaders of the named datasets share: finding an archive, and making a manifest of its images by class."""

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
# One picture of a folder of copies: its path in there, and what writes it.
Copy = tuple[Path, Callable[[Path], None]]


@dataclass(frozen=True)
class Request:
    """A named dataset, where to look for it, what its official archives are called, and how progress is shown."""

    name: str
    root: Path | None
    archive: str
    track: Track


def find(request: Request, *layouts: tuple[str, str]) -> tuple[Path, str]:
    """The folder of an unpacked archive and the file that gave it away; each layout is (folder, file in it).

    A root that the user gives may be the folder itself or the one around it.
    """
    root = request.root or Path("data")
    for folder, marker in layouts:
        for place in (root / folder, root) if request.root else (root / folder,):
            if (place / marker).exists():
                return place, marker
    wanted = " or ".join(str(Path(folder) / marker) for folder, marker in layouts)
    raise DataError(
        f"dataset '{request.name}' is not at {root}: it has no {wanted}",
        hint=f"unpack its official archive there ({request.archive}), or say where it is with --data-root",
    )


def read_lines(path: Path) -> list[str]:
    """The lines of an archive's own list, without empty ones."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="the archive's own files are needed") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file", hint="unpack the archive again") from None
    return [line.strip() for line in lines if line.strip()]


def check_names(names: Sequence[str], split: Split, path: Path) -> None:
    """Raise DataError unless an archive numbers its classes as the split does."""
    hint = "is it the official archive?"
    if len(names) != len(split.classes):
        raise DataError(f"{path} names {len(names)} classes, the split {len(split.classes)}", hint=hint)
    for number, (name, expected) in enumerate(zip(names, split.classes, strict=True)):
        if plain(name) != plain(expected):
            raise DataError(f"{path}: class {number} is '{name}', in the split it is '{expected}'", hint=hint)


def plain(name: str) -> str:
    """A class name without what folder names change: case, spaces and punctuation."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def by_class(pairs: Iterable[tuple[Path, int]], split: Split, path: Path) -> ByClass:
    """Images by class name, from class numbers (counted from 0) that were read from `path`."""
    images: dict[str, list[Path]] = {name: [] for name in split.classes}
    for image, number in pairs:
        if not 0 <= number < len(split.classes):
            raise DataError(f"{path}: there is no class {number}", hint="is it the official archive?")
        images[split.classes[number]].append(image)
    return images


def by_folder(root: Path, names: Sequence[str], *, track: Track) -> ByClass:
    """Images by class from class folders, whose names may differ in case and punctuation; absent classes are empty."""
    folders = {plain(entry.name): entry for entry in root.iterdir() if entry.is_dir()} if root.is_dir() else {}
    present = [name for name in names if plain(name) in folders]
    return {name: images_in(folders[plain(name)]) for name in track(present, f"listing {root.name}", len(present))}


def published(request: Request, split: Split, *, train: ByClass, test: ByClass) -> Manifest:
    """The manifest of a split; true novel classes are known and set apart."""
    empty = [name for name in split.classes if not train.get(name)]
    if empty:
        raise DataError(
            f"class '{empty[0]}' of '{request.name}' has no training images"
            + (f", nor have {len(empty) - 1} others" if len(empty) > 1 else ""),
            hint=f"unpack all of its official archive ({request.archive})" if request.archive else "remove its folder",
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
    """Images with the number of their class in `names`."""
    return [(path, number) for number, name in enumerate(names) for path in images.get(name, ())]


def write_copies(target: Path, list_copies: Callable[[], Sequence[Copy]], *, track: Track) -> None:
    """A folder of pictures made from an archive: written once and whole, and used again by whoever comes later."""
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
            f"cannot write {target}: {error}", hint="its folder needs to be writable and have room"
        ) from None


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """The processes of one `torchrun` wait here while the first of them writes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
