"""Places that users need not remember: runs below this folder, their bundles, and what each was exported to."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ncd_serve.bundle import MANIFEST, BundleManifest
from ncd_serve.contract import DEFAULT_MODEL
from ncd_serve.errors import DataError
from ncd_serve.files import write_json
from ncd_serve.reference import REFERENCE

DEFAULT_REPOSITORY = Path("model_repository")
EXPORTED = "exported.json"  # in a bundle, not hashed: it is about this machine, not about the model
FORMING = "forming.json"  # in a run: its clusters as they form
_RUN_FACTS = "environment.json"
_DEPTHS = ("", "*/", "*/*/")  # below the present folder: `runs/birds` is two levels down


class ExportPlace(NamedTuple):
    """Model in a repository that a bundle was exported to."""

    repository: Path
    model: str


class _Record(BaseModel):
    """Content of `exported.json`; the repository is relative to the bundle, so that both can be moved together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: Path
    model: str


def remember_export(folder: Path, place: ExportPlace, *, bundle: Path) -> None:
    """Write down where a bundle goes to, in `folder`, which is about to become `bundle`."""
    relative = os.path.relpath(place.repository.resolve(), bundle.resolve())
    write_json(folder / EXPORTED, {"repository": relative, "model": place.model})


def exported_to(bundle: Path) -> ExportPlace | None:
    """Return what a bundle was exported to; None if it does not say, or the model is not there any more."""
    try:
        record = _Record.model_validate_json((bundle / EXPORTED).read_bytes())
    except (OSError, ValidationError):
        return None
    place = ExportPlace(shortened((bundle.resolve() / record.repository).resolve()), record.model)
    return place if (place.repository / place.model).is_dir() else None


def export_place(bundle: Path) -> ExportPlace:
    """Return what a bundle was exported to; the default place if it does not say."""
    return exported_to(bundle) or ExportPlace(DEFAULT_REPOSITORY, DEFAULT_MODEL)


def shortened(path: Path) -> Path:
    """Return a path relative to the present folder if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def title_of(source: Path) -> str:
    """Return the name that people know a run or a bundle by: its folder's, or that of the folder around `run`."""
    folder = source.resolve()
    while re.fullmatch(r"(run|bundle)(-\d+)?", folder.name):
        folder = folder.parent
    return folder.name


def newest_run() -> Path:
    """Return the finished run that was started last, in this folder or up to two levels below it."""
    if not (runs := find_runs()):
        raise DataError("no finished run in this folder or below it", hint="name one, or make one: ncd-serve train")
    return runs[0]


def newest_bundle() -> Path:
    """Return the bundle of the newest run that has one, in its newest generation."""
    if not (bundles := list(_bundles())):
        raise DataError("no exported run in this folder or below it", hint="ncd-serve export RUN exports one")
    return newest_generation(bundles[0])


def bundle_of(source: Path) -> Path:
    """Return a bundle's folder: that of a run, in its newest generation, or `source` itself."""
    if (source / MANIFEST).is_file() or not (source / _RUN_FACTS).is_file():
        return source
    if not (source / "bundle" / MANIFEST).is_file():
        raise DataError(f"{source} was not exported yet", hint=f"ncd-serve export {source}")
    return newest_generation(source / "bundle")


def never_exported(folder: Path) -> bool:
    """Return whether a folder is a finished run that has no bundle."""
    is_run = (folder / _RUN_FACTS).is_file() and (folder / REFERENCE).is_file()
    return is_run and not (folder / "bundle" / MANIFEST).is_file()


def next_generation(folder: Path, generation: int) -> Path:
    """Return the default folder of the generation after that of a bundle or a run: `bundle-2` after `bundle`."""
    return folder.with_name(f"{_family(folder, generation)}-{generation + 1}")


def newest_generation(bundle: Path) -> Path:
    """Return the newest generation beside a bundle of the same training, or the bundle itself."""
    if (own := _manifest(bundle)) is None:
        return bundle
    found = {own.generation: bundle}
    for folder in bundle.parent.glob(f"{glob.escape(_family(bundle, own.generation))}-*"):
        about = _manifest(folder)
        if about and about.checkpoint == own.checkpoint and about.generation > own.generation:
            found[about.generation] = folder
    return found[max(found)]


def newest_descendant(bundle: Path) -> Path:
    """Return the newest generation beside a bundle, or in a run beside its run that was trained after it."""
    newest = newest_generation(bundle)
    if (own := _manifest(newest)) is None:
        return bundle
    run, found = bundle.absolute().parent, {own.generation: newest}
    for retrained in run.parent.glob(f"{glob.escape(_family(run, own.generation))}-*/bundle"):
        about = _manifest(folder := newest_generation(retrained))
        if about and own.checkpoint and own.checkpoint in about.lineage[1:] and about.generation > own.generation:
            found[about.generation] = shortened(folder)
    return found[max(found)]


def bundle_of_checkpoint(checkpoint: str) -> Path | None:
    """Return the newest generation of the newest run whose model is this one; None if there is none."""
    found = ((bundle, _manifest(bundle)) for bundle in _bundles())
    same = (bundle for bundle, about in found if about and about.checkpoint == checkpoint)
    return next(map(newest_generation, same), None)


def find_runs(*, finished: bool = True) -> list[Path]:
    """Return finished or unfinished runs, in this folder or up to two levels below it, the latest first."""
    runs = [file.parent for depth in _DEPTHS for file in Path().glob(depth + _RUN_FACTS)]
    times = {run: started(run) for run in runs if (run / REFERENCE).is_file() is finished}
    return sorted((run for run, when in times.items() if when), key=lambda run: times[run], reverse=True)


def started(run: Path) -> str:
    """Return when a training run was started, as text in an order of time; empty for those of other commands."""
    try:
        found = json.loads((run / _RUN_FACTS).read_bytes())
        return str(found["created"]) if found.get("made_by", "train") == "train" else ""
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return ""


def _bundles() -> Iterator[Path]:
    return (run / "bundle" for run in find_runs() if (run / "bundle" / MANIFEST).is_file())


def _family(folder: Path, generation: int) -> str:
    """Return what the default names of all generations begin with."""
    return folder.name.removesuffix(f"-{generation}")


def _manifest(bundle: Path) -> BundleManifest | None:
    """Return what a bundle says of itself; None if it is none, or damaged."""
    file = bundle / MANIFEST
    try:
        return BundleManifest.model_validate_json(file.read_bytes()) if file.is_file() else None
    except (OSError, ValidationError):
        return None
