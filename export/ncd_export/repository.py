"""Folder of a model in a Triton repository: config.pbtxt, labels.txt, and a folder for each version."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ncd_export.triton_config import MARK, THIS_CPU, Hardware, render_config
from ncd_serve.bundle import LABELS, MANIFEST, MODEL, Bundle, BundleManifest
from ncd_serve.contract import THREADS
from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import (
    atomic_directory,
    atomic_path,
    is_unfinished,
    locked,
    no_empty_folders,
    staged_directory,
    swap_in,
    write_text,
)
from ncd_serve.signature import copy_signature
from ncd_serve.triton.jpeg import add_jpeg_model, jpeg_model_name
from ncd_serve.triton.repository import CONFIG, MODEL_NAME, VERSION, read_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}(\.old)?")  # hidden names of what killed processes were writing


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
    with no_empty_folders(repository):
        repository.mkdir(parents=True, exist_ok=True)
        with locked(repository):
            version = next_version(repository, name, replace=replace)
            return add_version(bundle, repository, name=name, version=version, hardware=hardware, keep=keep)


def next_version(repository: Path, name: str, *, replace: bool = False) -> int:
    """Return the number of the version to write: a new one, or with `replace` the newest."""
    versions = _versions(repository / name)
    if replace and versions:
        return versions[-1]
    # A killed process may have left one for image files alone, and a server may have read it already.
    return max([*versions, *_versions(repository / jpeg_model_name(name))], default=0) + 1


def add_version(
    bundle: Bundle, repository: Path, *, name: str, version: int, hardware: Hardware, keep: int | None = None
) -> Path:
    """Write one version of a model in a repository that is locked; return its folder.

    The model's folder, with configuration, labels and all versions, is replaced in one step. It is prepared in the
    folder of the model for image files, since Triton takes every folder of a repository for a model.
    """
    folder, jpeg = repository / name, repository / jpeg_model_name(name)
    versions = sorted({*_versions(folder), version})[-(keep or 0) :]
    config = render_config(bundle, name=name, hardware=hardware)
    with no_empty_folders(jpeg), staged_directory(jpeg / name) as fresh:
        _link_all(folder, fresh)
        _write_version(bundle, fresh, config, version)
        _remove(fresh, versions)
        add_jpeg_model(bundle, repository, name=name, version=version)
        swap_in(fresh, folder)
    _remove(jpeg, versions)
    return folder / str(version)


def _link_all(folder: Path, fresh: Path) -> None:
    """Fill a folder with the files of another one, as hard links."""
    if folder.is_dir():
        shutil.copytree(folder, fresh, symlinks=True, copy_function=_link, dirs_exist_ok=True)


def _remove(folder: Path, versions: list[int]) -> None:
    """Remove all versions but these, and whatever a killed process was writing."""
    for entry in folder.iterdir():
        if _LEFTOVER.fullmatch(entry.name) or (VERSION.fullmatch(entry.name) and int(entry.name) not in versions):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _write_version(bundle: Bundle, folder: Path, config: str, version: int) -> None:
    with atomic_directory(folder / str(version)) as fresh:
        shutil.copyfile(bundle.model_path, fresh / MODEL)
        copy_signature(bundle.folder, fresh)
    with atomic_path(folder / LABELS) as labels:
        shutil.copyfile(bundle.folder / LABELS, labels)
    write_text(folder / CONFIG, config)


def check_place(repository: Path, name: str) -> None:
    """Raise an error if a model of this name cannot be written: invalid name, foreign model, or no permission."""
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(f"'{name}' is not a valid model name", hint="use letters, digits, and _ . -")
    config = repository / name / CONFIG
    marked = config.is_file() and MARK in config.read_text(errors="replace")
    if config.parent.exists() and not (marked or is_unfinished(config.parent)):
        raise DataError(f"{config.parent} was not made by ncd-serve", hint="choose another --model-name or repository")
    check_writable(config.parent)


def check_clusters(repository: Path, name: str, lineage: Sequence[str]) -> None:
    """Raise DataError if the ids of a model's newest version mean other clusters than those to be written.

    `lineage` is the checkpoint to be written, and those before it with the same ids. Generations share their ids.
    """
    jpeg = repository / jpeg_model_name(name)
    versions = _versions(repository / name)
    try:
        served = BundleManifest.model_validate_json((jpeg / str(max(versions, default=0)) / MANIFEST).read_bytes())
    except (OSError, ValidationError):  # no such model, or one of an older version
        return
    if served.checkpoint and served.checkpoint not in lineage and lineage[0] not in served.lineage:
        raise DataError(
            f"the model '{name}' in {repository} has the clusters of another run ({served.dataset}, "
            f"{len(served.cluster_names)} clusters, {served.created})",
            hint="give this one a name of its own with --model-name; `ncd-serve export --replace-model` takes it over",
        )


def check_writable(folder: Path) -> None:
    """Raise DataError if a folder, which need not exist yet, cannot be written."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise DataError(f"cannot write to {nearest}", hint="change its permissions, or choose another folder")


@contextmanager
def disk_errors_as_data_errors(target: Path) -> Iterator[None]:
    """Convert OSError into DataError; for blocks that write a target and undo their changes when they fail."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {target}: {error.strerror or error}",
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
