"""A model's folder in a Triton repository: config.pbtxt, labels.txt, and a folder for each version."""

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
    """Add the bundle's model as the next version, or in place of the newest; returns the version's folder.

    `keep`: so many versions stay, older ones are removed. A server that looks while this runs sees either state.
    """
    check_place(repository, name)
    folder = repository / name
    newest = max(_versions(folder), default=0)
    target = folder / str(newest if replace and newest else newest + 1)
    config = render_config(bundle, name=name, hardware=hardware)
    with (
        _no_empty_folders(folder, repository),
        # All is on the disk before any of it appears: the version first, then the labels, then what names them.
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
    """Raise when a model of that name cannot be written there: a bad name, somebody else's model, no right to."""
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(f"'{name}' cannot be a model name", hint="use letters, digits, and _ . -")
    config = repository / name / CONFIG
    if config.parent.exists() and not (config.is_file() and MARK in config.read_text(errors="replace")):
        raise DataError(f"{config.parent} was not made by ncd-serve", hint="choose another --model-name or repository")
    check_writable(config.parent)


def check_writable(folder: Path) -> None:
    """Raise DataError when a folder, which need not exist yet, cannot be written to."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise DataError(f"cannot write to {nearest}", hint="change its permissions, or choose another folder")


@contextmanager
def disk_errors_as_data_errors(bundle: Path) -> Iterator[None]:
    """Turn what the disk refuses into DataError; for blocks that leave all as it was when they fail."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or bundle}: {error.strerror or error}",
            hint="nothing was changed; free some space, or choose another place for the bundle or the repository",
        ) from error


def hardware_of(repository: Path, name: str) -> Hardware:
    """Device that a model's configuration is written for; this machine's CPU for a model that does not exist yet."""
    config = read_config(repository / name / CONFIG)
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        return Hardware(accelerator.name)
    return Hardware(cores=int(config.parameters[THREADS].string_value or 0) or None)


def _versions(folder: Path) -> list[int]:
    """Oldest first."""
    return sorted(int(entry.name) for entry in folder.glob("*") if VERSION.fullmatch(entry.name))


@contextmanager
def _no_empty_folders(*folders: Path) -> Iterator[None]:
    """Remove folders that a failure left empty: Triton would take them for models."""
    try:
        yield
    except BaseException:
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()
        raise
