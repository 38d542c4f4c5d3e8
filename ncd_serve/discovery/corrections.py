"""Corrections of single images as labels of the next round: what a person said counts, not what the model answered."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.errors import DataError
from ncd_serve.mixture import relabel
from ncd_serve.naming import WRONG, Correction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ncd_serve.bundle import Bundle
    from ncd_serve.reference import Reference

    Ids = NDArray[np.integer[Any]]

NOWHERE = -1  # of an image that belongs to no cluster of the model


def corrections_of(bundle: Bundle, reference: Reference) -> dict[str, Correction]:
    """Return the corrections of a bundle by absolute path; DataError if two of them contradict each other."""
    said: dict[str, Correction] = {}
    for path, to in bundle.manifest.images.items():
        file = os.path.normpath(reference.root.absolute() / path)
        if said.setdefault(file, to) != to:
            raise _contradiction([file], said[file], to)
    first: dict[bytes, str] = {}
    for file, vector in zip(_files(reference), reference.every_embedding(), strict=True):
        other = first.setdefault(vector.tobytes(), file) if file in said else file
        if said.get(other) != said.get(file):
            raise _contradiction([other, file], said[other], said[file])
    return said


def check_accepted(corrections: dict[str, Correction], images: Iterable[str]) -> None:
    """Raise DataError if an image of a new category was said to be in a cluster."""
    for path in images:
        to = corrections.get(os.path.normpath(path), WRONG)
        if to != WRONG:
            raise DataError(
                f"{path} is in a new category, but a correction says that it is in cluster {to}",
                hint="remove it from the candidates, or take the correction back: "
                '{"clusters": {}, "images": {"PATH": null}} for ncd-serve name apply',
            )


def corrected(reference: Reference, corrections: dict[str, Correction]) -> Reference:
    """Return the reference with what a person said.

    Moved images are in the clusters that they were given to; those of no cluster of the model are set aside, and are
    back where they were once their correction is taken back. The means of the classes in the mixture follow.
    """
    said = [corrections.get(file) for file in _files(reference)]
    homes = np.concatenate([reference.cluster_ids, reference.aside_ids])
    before = np.concatenate([reference.cluster_ids, np.full(len(reference.aside_ids), NOWHERE)])
    now = np.array(
        [
            home if to is None else NOWHERE if to == WRONG or to >= reference.clusters else to
            for home, to in zip(homes.tolist(), said, strict=True)
        ]
    )
    if np.array_equal(now, before):
        return reference
    if (now == NOWHERE).all():
        raise DataError("no image is left in any cluster", hint="take some corrections back")
    counts, number = reference.counts, reference.clusters
    for ids, sign in ((before, -1), (now, 1)):
        counts = counts + sign * np.bincount(ids[(before != now) & (ids != NOWHERE)], minlength=number)
    return replace(_placed(_relabelled(reference, before, now), homes, now), counts=counts)


def _relabelled(reference: Reference, before: Ids, now: Ids) -> Reference:
    """Return the reference with a mixture whose means follow images from clusters `before` to clusters `now`."""
    mixture, first = reference.mixture(), reference.first_cluster
    if mixture is None:  # a file of an older version
        return reference
    _, classes = reference.places()
    sizes = np.bincount(classes, minlength=len(mixture.means))
    moved = np.flatnonzero(before != now)
    places = mixture.project(reference.every_embedding()[moved])
    sides = [np.where(ids == NOWHERE, NOWHERE, first + ids)[moved] for ids in (before, now)]
    return reference.with_mixture(relabel(mixture, places, *sides, sizes=sizes))


def _placed(reference: Reference, homes: Ids, now: Ids) -> Reference:
    """Return the reference with all its images, set aside or not, in the clusters `now`; `homes` are earlier ones."""
    stay = now != NOWHERE
    paths, truth = [*reference.paths, *reference.aside_paths], []
    if reference.truth and len(reference.truth) == len(paths):
        truth = [name for name, kept in zip(reference.truth, stay, strict=True) if kept]
    both = {name: _all(reference, name) for name in ("confidences", "embeddings", "known_ids")}
    return replace(
        reference,
        paths=[path for path, kept in zip(paths, stay, strict=True) if kept],
        truth=truth,
        cluster_ids=now[stay],
        **{name: values[stay] for name, values in both.items()},
        aside_paths=[path for path, kept in zip(paths, stay, strict=True) if not kept],
        aside_ids=homes[~stay],
        **{f"aside_{name}": values[~stay] for name, values in both.items()},
    )


def _all(reference: Reference, name: str) -> NDArray[Any]:
    """Return an array of the images, those that are set aside last."""
    kept, aside = getattr(reference, name), getattr(reference, f"aside_{name}")
    return np.concatenate([kept, aside]) if len(aside) else kept


def _files(reference: Reference) -> list[str]:
    return [str(file) for file in reference.every_file()]


def _contradiction(files: list[str], one: Correction, other: Correction) -> DataError:
    first, second = ("in no cluster" if to == WRONG else f"in cluster {to}" for to in (one, other))
    what = files[0] if len(files) == 1 else f"{files[0]} and {files[1]}, the same image,"
    return DataError(
        f"corrections contradict each other: {what} is said to be {first} and {second}",
        hint='take one back: {"clusters": {}, "images": {"PATH": null}} for ncd-serve name apply',
    )
