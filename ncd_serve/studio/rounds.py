"""The next round: categories that a person made of new images, or of corrected ones, become clusters of the model."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ncd_serve.bundle import Bundle
from ncd_serve.discovery.find import Candidate, Candidates
from ncd_serve.errors import DataError, needs_extra
from ncd_serve.files import write_json
from ncd_serve.inputs.images import is_image
from ncd_serve.naming import WRONG
from ncd_serve.places import next_generation, shortened
from ncd_serve.studio.commands import run_command

if TYPE_CHECKING:
    from ncd_serve.progress import Progress

_MIN_IMAGES = 2  # of a category
_ACCEPTED = "candidates.json"


def waiting(bundle: Bundle, new_categories: Path) -> dict[str, Any]:
    """Return the categories that the next round would take in, with their numbers of images, and those that wait.

    `kept` are those of new images, which can be taken back.
    """
    kept = {name: len(files) for name, files in kept_images(new_categories).items()}
    corrected = {bundle.manifest.new_names[number]: images for number, images in _corrected(bundle).items()}
    counts = {name: max(kept.get(name, 0), corrected.get(name, 0)) for name in [*kept, *corrected]}
    return {
        "kept": kept,
        "ready": {name: images for name, images in counts.items() if images >= _MIN_IMAGES},
        "too_small": [name for name, images in counts.items() if images < _MIN_IMAGES],
    }


def next_round(bundle: Bundle, new_categories: Path, *, progress: Progress) -> Path:
    """Append the categories to the bundle, publish the next generation where it was exported to; return its folder."""
    if not waiting(bundle, new_categories)["ready"]:
        raise DataError("no category has two images", hint="make a category of new images, or split a cluster")
    with needs_extra("export"):
        from ncd_export.append import append_generation, next_folder
    added = new_categories if kept_images(new_categories) else _a_corrected_image(bundle)
    folder = next_folder(bundle.folder)
    with TemporaryDirectory() as scratch:
        accepted = _accept(bundle, new_categories, Path(scratch) / _ACCEPTED)
        append_generation(bundle.folder, added, accept=accepted, out=folder, progress=progress)
    try:
        run_command("export", str(folder))
    except BaseException:
        shutil.rmtree(folder)  # nobody serves it: the next try makes it once more
        raise
    return folder


def next_run(bundle: Bundle) -> Path:
    """Return the run of a training again, whether it has begun or not."""
    return shortened(next_generation(bundle.folder.absolute().parent, bundle.manifest.generation))


def again(bundle: Bundle, new_categories: Path) -> list[str]:
    """Return the command that trains again on the categories and all corrections."""
    words = ["train", "--after", str(bundle.folder), "--retrain"]
    if kept_images(new_categories):
        words += ["--add", str(new_categories)]
        words += ["--accept", str(_accept(bundle, new_categories, new_categories / _ACCEPTED))]
    return words


def _accept(bundle: Bundle, new_categories: Path, target: Path) -> Path:
    """Write the kept categories as accepted candidates."""
    about = bundle.manifest
    chosen = [
        Candidate(name=name, images=[str(file.absolute()) for file in files])
        for name, files in kept_images(new_categories).items()
        if len(files) >= _MIN_IMAGES
    ]
    found = Candidates(checkpoint=about.checkpoint, generation=about.generation, candidates=chosen)
    write_json(target, found.model_dump(mode="json"))
    return target


def changes(bundle: Bundle) -> list[dict[str, Any]]:
    """Return what became of every cluster since the generation before, by id and name."""
    names = bundle.manifest.cluster_names
    return [{"name": names[change.cluster_id], **change.model_dump()} for change in bundle.manifest.changes]


def kept_images(new_categories: Path) -> dict[str, list[Path]]:
    """Return the new images that were kept, by category."""
    folders = sorted(folder for folder in new_categories.glob("*") if folder.is_dir())
    # One that is being written has another ending yet.
    found = {folder.name: sorted(file for file in folder.iterdir() if is_image(Path(file.name))) for folder in folders}
    return {name: files for name, files in found.items() if files}


def _corrected(bundle: Bundle) -> dict[int, int]:
    """Return the numbers of images of clusters that exist by corrections alone."""
    about = bundle.manifest
    return dict(Counter(to for to in about.images.values() if to != WRONG and to in about.new_names))


def _a_corrected_image(bundle: Bundle) -> Path:
    """Return an image of such a cluster: a round without new images is made of old ones alone."""
    about = bundle.manifest
    return bundle.reference().root / next(path for path, to in about.images.items() if to in about.new_names)
