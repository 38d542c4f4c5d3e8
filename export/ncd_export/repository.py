"""Folder of a model in a Triton repository: config.pbtxt, labels.txt, and a folder for each version."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ncd_export.triton_config import MARK, THIS_CPU, Hardware, render_config
from ncd_serve.bundle import LABELS, MODEL, Bundle
from ncd_serve.contract import THREADS
from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import atomic_directory, atomic_path
from ncd_serve.triton.jpeg import add_jpeg_model, jpeg_model_name
from ncd_serve.triton.repository import CONFIG, MODEL_NAME, VERSION, read_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def add_to_repository(
    bundle: Bundle,
    repository: Path,
    *,
    name: str,
    hardware: Hardware = THIS_CPU,
    replace: bool = False,
    keep: int | None = None,
) -> Path:
    """Add the bundle's model as the next version, or replace the newest; return the folder of the version.

    `keep` is the number of versions to keep; older ones are removed. A server sees either the old or the new state.
    """
    check_place(repository, name)
    folder = repository / name
    newest = max(_versions(folder), default=0)
    target = folder / str(newest if replace and newest else newest + 1)
    config = render_config(bundle, name=name, hardware=hardware)
    with (
        _no_empty_folders(folder, repository),
        # All files are complete before any of them appears: the version first, then labels, then the configuration.
        atomic_path(folder / CONFIG) as new_config,
        atomic_path(folder / LABELS) as new_labels,
        atomic_directory(target) as fresh,
    ):
        shutil.copyfile(bundle.model_path, fresh / MODEL)
        shutil.copyfile(bundle.folder / LABELS, new_labels)
        new_config.write_text(config, encoding="utf-8")
        add_jpeg_model(bundle, repository, name=name, version=int(target.name))
    if keep is not None:
        for entry in (folder, repository / jpeg_model_name(name)):
            for version in _versions(entry)[:-keep]:
                shutil.rmtree(entry / str(version))
    return target


def check_place(repository: Path, name: str) -> None:
    """Raise an error if a model of this name cannot be written: invalid name, foreign model, or no permission."""
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(f"'{name}' is not a valid model name", hint="use letters, digits, and _ . -")
    config = repository / name / CONFIG
    if config.parent.exists() and not (config.is_file() and MARK in config.read_text(errors="replace")):
        raise DataError(f"{config.parent} was not made by ncd-serve", hint="choose another --model-name or repository")
    check_writable(config.parent)


def check_writable(folder: Path) -> None:
    """Raise DataError if a folder, which need not exist yet, cannot be written."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise DataError(f"cannot write to {nearest}", hint="change its permissions, or choose another folder")


@contextmanager
def disk_errors_as_data_errors(bundle: Path) -> Iterator[None]:
    """Convert OSError into DataError; for blocks that undo their changes when they fail."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or bundle}: {error.strerror or error}",
            hint="nothing was changed; free some disk space, or choose another folder for the bundle or the repository",
        ) from error


def hardware_of(repository: Path, name: str) -> Hardware:
    """Return the hardware that a model is configured for; this machine's CPU for a new model."""
    config = read_config(repository / name / CONFIG)
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        return Hardware(accelerator.name)
    return Hardware(cores=int(config.parameters[THREADS].string_value or 0) or None)


def _versions(folder: Path) -> list[int]:
    """Return the numbers of the versions, oldest first."""
    return sorted(int(entry.name) for entry in folder.glob("*") if VERSION.fullmatch(entry.name))


@contextmanager
def _no_empty_folders(*folders: Path) -> Iterator[None]:
    """Remove folders that a failure left empty: Triton would treat them as models."""
    try:
        yield
    except BaseException:
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()
        raise
