"""CIFAR-10 and CIFAR-100 from their official python or binary archives.

The archives hold pixels, but the package works on image files. The images are written once, as PNG files beside the
archive.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ncd_serve.errors import DataError
from ncd_training.data.datasets.archives import (
    Copy,
    Request,
    Split,
    by_folder,
    check_names,
    find,
    load_split,
    published,
    read_lines,
    write_copies,
)
from ncd_training.data.manifest import Manifest

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True)
class _Layout:
    """Names inside one form of an archive (python or binary)."""

    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    label_key: str = ""  # python form: the key of the labels, and of the class names
    names_key: str = ""
    label_bytes: int = 1  # binary form: the class is the last of these bytes before the pixels


class Pictures(NamedTuple):
    """Images of an archive's file, with their labels."""

    pixels: NDArray[np.uint8]  # [n, 32, 32, 3]
    labels: list[int]


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR10 = (
    _Layout("cifar-10-batches-py", _BATCHES, "test_batch", "batches.meta", "labels", "label_names"),
    _Layout("cifar-10-batches-bin", tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", "batches.meta.txt"),
)
_CIFAR100 = (
    _Layout("cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names"),
    _Layout("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", label_bytes=2),
)


def cifar10(request: Request) -> Manifest:
    """Return the manifest: classes 0-4 known, 5-9 novel."""
    return _cifar(request, _CIFAR10)


def cifar100(request: Request) -> Manifest:
    """Return the manifest: classes 0-79 known, 80-99 novel."""
    return _cifar(request, _CIFAR100)


def _cifar(request: Request, layouts: Sequence[_Layout]) -> Manifest:
    split = load_split(request.name)
    folder, marker = find(request, *((layout.folder, layout.train[0]) for layout in layouts))
    pictures = folder.parent / f"{request.name}-png"
    layout = next(layout for layout in layouts if layout.train[0] == marker)
    write_copies(pictures, partial(_copies, folder, layout, split), track=request.track)
    train, test = (by_folder(pictures / part, split.classes, track=request.track) for part in ("train", "test"))
    return published(request, split, train=train, test=test)


def _copies(folder: Path, layout: _Layout, split: Split) -> list[Copy]:
    names = _names(folder / layout.names, layout)
    check_names(names, split, folder / layout.names)
    copies: list[Copy] = []
    for part, files in (("train", layout.train), ("test", (layout.test,))):
        number = 0
        for file in files:
            pixels, labels = _pictures(folder / file, layout, classes=len(names))
            for picture, label in zip(pixels, labels, strict=True):
                target = Path(part) / split.classes[label] / f"{number:05d}.png"
                copies.append((target, partial(_save, picture)))
                number += 1
    return copies


def _save(pixels: NDArray[np.uint8], target: Path) -> None:
    Image.fromarray(pixels).save(target)


def _names(path: Path, layout: _Layout) -> list[str]:
    if not layout.names_key:
        return read_lines(path)
    try:
        return [str(name) for name in load_pickle(path)[layout.names_key]]
    except (KeyError, TypeError):
        raise DataError(f"{path} has no '{layout.names_key}'", hint="use the official archive") from None


def _pictures(path: Path, layout: _Layout, *, classes: int) -> Pictures:
    pixels, labels = _from_pickle(path, layout.label_key) if layout.label_key else _from_bytes(path, layout.label_bytes)
    wrong = [label for label in labels if not 0 <= label < classes]
    if pixels.shape != (len(labels), _PIXELS) or pixels.dtype != np.uint8 or wrong:
        raise DataError(f"{path} does not hold CIFAR's images and labels", hint="use the official archive")
    return Pictures(pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), labels)


def _from_pickle(path: Path, label_key: str) -> tuple[NDArray[np.uint8], list[int]]:
    batch = load_pickle(path)
    try:
        return np.asarray(batch["data"]), [int(label) for label in batch[label_key]]
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path} has no 'data' and '{label_key}'", hint="use the official archive") from None


def _from_bytes(path: Path, label_bytes: int) -> tuple[NDArray[np.uint8], list[int]]:
    content = np.frombuffer(_content(path), np.uint8)
    size = label_bytes + _PIXELS
    if len(content) % size:
        raise DataError(f"{path} is cut short: {len(content):,} bytes", hint="unpack the archive again")
    rows = content.reshape(-1, size)
    return rows[:, label_bytes:], rows[:, label_bytes - 1].tolist()


class _NumbersOnly(pickle.Unpickler):
    """Unpickler that rebuilds numpy arrays and nothing else: a pickle may run any code."""

    _RECONSTRUCT = np.empty(0).__reduce__()[0]
    _ALLOWED = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the function that a pickle calls, if it is allowed."""
        try:
            return self._ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it calls {module_name}.{global_name}") from None


def load_pickle(path: Path) -> Any:
    """Load a pickle of numbers and text from Python 2; DataError if it calls anything else."""
    try:
        return _NumbersOnly(io.BytesIO(_content(path)), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, MemoryError) as error:
        raise DataError(
            f"{path} is not a pickle of CIFAR's numbers: {error}", hint="unpack the official archive again"
        ) from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="unpack the whole official archive") from None
