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
    rows = {file: row for row, file in enumerate(_files(reference)) if file in said}
    first: dict[bytes, str] = {}
    for file, row in rows.items():
        other = first.setdefault(reference.embeddings[row].tobytes(), file)
        if said[other] != said[file]:
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

    Moved images are in the clusters that they were given to; those of no cluster of the model are left out. The means
    of the classes in the mixture follow.
    """
    said = [corrections.get(file) for file in _files(reference)]
    now = np.array(
        [
            number if to is None else NOWHERE if to == WRONG or to >= reference.clusters else to
            for number, to in zip(reference.cluster_ids.tolist(), said, strict=True)
        ]
    )
    moved, stay = now != reference.cluster_ids, now != NOWHERE
    if not moved.any():
        return reference
    if not stay.any():
        raise DataError("no image is left in any cluster", hint="take some corrections back")
    counts = reference.counts - np.bincount(reference.cluster_ids[moved], minlength=reference.clusters)
    counts += np.bincount(now[moved & stay], minlength=reference.clusters)
    return replace(
        _relabelled(reference, moved, now),
        paths=[path for path, kept in zip(reference.paths, stay, strict=True) if kept],
        truth=[name for name, kept in zip(reference.truth, stay, strict=True) if kept] if reference.truth else [],
        cluster_ids=now[stay],
        counts=counts,
        **{name: getattr(reference, name)[stay] for name in ("confidences", "embeddings", "known_ids")},
    )


def _relabelled(reference: Reference, moved: NDArray[np.bool_], now: Ids) -> Reference:
    mixture, first = reference.mixture(), reference.first_cluster
    if mixture is None:  # a file of an older version
        return reference
    _, classes = reference.places()
    sizes = np.bincount(classes, minlength=len(mixture.means))
    places = mixture.project(reference.embeddings[moved])
    target = np.where(now[moved] == NOWHERE, NOWHERE, first + now[moved])
    return reference.with_mixture(relabel(mixture, places, first + reference.cluster_ids[moved], target, sizes=sizes))


def _files(reference: Reference) -> list[str]:
    return [os.path.normpath(file.absolute()) for file in reference.files()]


def _contradiction(files: list[str], one: Correction, other: Correction) -> DataError:
    first, second = ("in no cluster" if to == WRONG else f"in cluster {to}" for to in (one, other))
    what = files[0] if len(files) == 1 else f"{files[0]} and {files[1]}, the same image,"
    return DataError(
        f"corrections contradict each other: {what} is said to be {first} and {second}",
        hint='take one back: {"clusters": {}, "images": {"PATH": null}} for ncd-serve name apply',
    )
