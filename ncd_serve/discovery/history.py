"""Generations that a bundle descends from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ncd_serve.bundle import Ancestor, Bundle
from ncd_serve.errors import DataError


class Generation(NamedTuple):
    """One generation, as `history` shows it."""

    generation: int
    bundle_id: str
    created: str
    clusters: int
    images: int | None  # that the clusters were found in; None where it is not known
    scores: dict[str, float]  # ACC by split, where true classes are known; of the state that was trained
    verdict: str  # on the clusters without true classes; empty where it is not known
    changes: str  # since the one before, in words
    folder: str | None  # where the bundle is; None if it is there no more


def generations(folder: str | Path) -> list[Generation]:
    """Return the generations of a bundle, the first one first and the bundle itself last."""
    bundle = Bundle.read(folder)
    about = bundle.manifest
    itself = Generation(
        about.generation,
        about.bundle_id,
        about.created,
        len(about.cluster_names),
        Ancestor.of(bundle).images,
        about.scores,
        about.verdict,
        _in_words(bundle),
        str(bundle.folder),
    )
    return [*map(_ancestor, about.ancestors), itself]


def _ancestor(entry: Ancestor) -> Generation:
    """Return an earlier generation; its bundle may be gone, or have been named since."""
    try:
        bundle = Bundle.read(entry.folder)
    except (DataError, OSError):
        bundle = None
    if bundle is not None and bundle.manifest.generation != entry.generation:
        bundle = None
    changes = _in_words(bundle) if bundle else "-"
    return Generation(
        entry.generation,
        entry.bundle_id,
        entry.created,
        entry.clusters,
        entry.images,
        entry.scores,
        entry.verdict,
        changes,
        entry.folder if bundle else None,
    )


def _in_words(bundle: Bundle) -> str:
    about = bundle.manifest
    if about.generation == 1:
        images = about.training.get("unlabelled_images")
        return f"found in {images} images" if images else "trained"
    kinds = Counter(change.kind for change in about.changes)
    new = ", ".join(about.cluster_names[change.cluster_id] for change in about.changes if change.kind == "new")
    return "; ".join(f"{count} {kind}{f' ({new})' if kind == 'new' else ''}" for kind, count in kinds.items())
