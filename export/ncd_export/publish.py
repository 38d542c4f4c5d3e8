"""Publishing: a bundle's folder and its version in a model repository change together, or not at all.

All of it is prepared under hidden names. The version's folder in the model for image files appears first: that is the
commit point. What follows are two renames, which the next publishing finishes if this process was killed between them.
Folders of bundles and repositories are locked meanwhile.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from ncd_export.repository import add_version, disk_errors_as_data_errors, next_version
from ncd_export.triton_config import Hardware
from ncd_serve.bundle import LABELS, MANIFEST, Bundle, BundleManifest
from ncd_serve.files import locked, no_empty_folders, sha256, swap_in, write_text
from ncd_serve.places import ExportPlace, remember_export
from ncd_serve.signature import SIGNATURE
from ncd_serve.text import labels_text
from ncd_serve.triton.jpeg import jpeg_model_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Destination(BaseModel):
    """Model in a repository that a bundle is published to."""

    model_config = ConfigDict(frozen=True)

    repository: Path
    name: str
    hardware: Hardware = Hardware()
    replace: bool = False
    keep: int | None = None


class _Journal(BaseModel):
    """Record of a publishing in progress: a hidden file beside the bundle's folder, for as long as it takes."""

    staged: str  # name of the prepared folder, beside the bundle's
    version: int
    destination: Destination

    @property
    def committed(self) -> Path:
        """The file that says whether it was committed."""
        place = self.destination
        return place.repository / jpeg_model_name(place.name) / str(self.version) / MANIFEST


@contextmanager
def publishing(out: Path, repository: Path) -> Iterator[None]:
    """Lock a bundle's folder and a repository for the block; first, finish what killed processes have committed."""
    with no_empty_folders(out.parent, repository):
        for folder in (out.parent, repository):
            folder.mkdir(parents=True, exist_ok=True)
        while True:
            finish_interrupted(out)
            with locked(out.parent, repository):
                if not _journal(out).exists():
                    yield
                    return


def seal(folder: Path, manifest: BundleManifest, files: Iterable[str]) -> None:
    """Write the labels of a prepared bundle and, last, its manifest with the hashes of its other files.

    A signature that came with copied files is of another manifest.
    """
    (folder / SIGNATURE).unlink(missing_ok=True)
    write_text(folder / LABELS, labels_text(manifest.cluster_names))
    hashes = {file: sha256(folder / file) for file in files}
    write_text(folder / MANIFEST, manifest.model_copy(update={"sha256": hashes}).model_dump_json(indent=2) + "\n")


def publish(staged: Path, out: Path, destination: Destination) -> Path:
    """Put a prepared bundle in its place and add it to a repository, both locked; return the folder of the version."""
    place = destination.model_copy(update={"repository": destination.repository.resolve()})
    version = next_version(place.repository, place.name, replace=place.replace)
    journal = _Journal(staged=staged.name, version=version, destination=place)
    bundle = Bundle.read(staged)
    try:
        with disk_errors_as_data_errors(out):
            remember_export(staged, ExportPlace(place.repository, place.name), bundle=out)
            _journal(out).write_text(journal.model_dump_json())
        with disk_errors_as_data_errors(destination.repository / place.name):
            _add(bundle, journal)
        swap_in(staged, out)
    finally:
        _journal(out).unlink(missing_ok=True)
    return destination.repository / place.name / str(version)


def finish_interrupted(out: Path) -> None:
    """Finish a publishing whose process was killed after its commit point, and forget one that was killed before."""
    if (journal := _read(out)) is None or not journal.destination.repository.is_dir():
        _journal(out).unlink(missing_ok=True)
        return
    with locked(out.parent, journal.destination.repository):
        if _read(out) != journal:  # it was alive, or another process has finished it
            return
        staged = out.with_name(journal.staged)
        if _same_content(staged / MANIFEST, journal.committed):
            _add(Bundle.read(staged), journal)
            swap_in(staged, out)
        _journal(out).unlink(missing_ok=True)


def _add(bundle: Bundle, journal: _Journal) -> None:
    place = journal.destination
    add_version(
        bundle, place.repository, name=place.name, version=journal.version, hardware=place.hardware, keep=place.keep
    )


def _journal(out: Path) -> Path:
    return out.with_name(f".{out.name}.publishing")


def _read(out: Path) -> _Journal | None:
    try:
        return _Journal.model_validate_json(_journal(out).read_bytes())
    except (OSError, ValidationError):  # there is none, or it was killed while writing it
        return None


def _same_content(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False
