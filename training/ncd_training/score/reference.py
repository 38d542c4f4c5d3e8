"""Outputs of a trained model for the unlabelled images, as gallery, fit and drift use them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.files import sha256
from ncd_serve.reference import Reference
from ncd_training.score.metrics import matched_clusters

if TYPE_CHECKING:
    from ncd_training.data.manifest import Manifest
    from ncd_training.model.predict import Ids, Outputs

_ID_DIGITS = 12  # of the SHA-256 hash of a checkpoint


def to_reference(
    outputs: Outputs, manifest: Manifest, *, checkpoint: Path, clusters_are_classes: bool = False
) -> Reference:
    """Return the outputs for the unlabelled images of the state in `checkpoint`, as a run and a bundle keep them.

    `clusters_are_classes`: the first clusters are the known classes (an open-world head).
    """
    files = [path.absolute() for path in manifest.unlabelled]
    root = Path(os.path.commonpath([file.parent for file in files]))
    names = dict(enumerate(manifest.novel_names))
    return Reference(
        checkpoint=checkpoint_id(checkpoint),
        root=root,
        paths=[str(file.relative_to(root)) for file in files],
        cluster_ids=outputs.cluster_ids,
        confidences=outputs.confidences,
        embeddings=outputs.embedding,
        known_ids=outputs.nearest_known,
        known_classes=manifest.known_classes,
        known_clusters=len(manifest.known_classes) if clusters_are_classes else 0,
        counts=np.bincount(outputs.cluster_ids, minlength=outputs.clusters),
        truth=[names.get(number, str(number)) for number in manifest.truth or ()],
        matched=class_of_clusters(outputs.cluster_ids, manifest.truth or (), names, clusters=outputs.clusters),
    ).sampled()


def class_of_clusters(ids: Ids, truth: Sequence[int], names: Mapping[int, str], *, clusters: int) -> list[str]:
    """Return the true class of every cluster under the matching of ACC, "" if they share no image; [] without truth."""
    if not truth:
        return []
    classes, true = [""] * clusters, np.array(truth)
    matched = matched_clusters(ids, true)
    for number in np.unique(true[matched[true] == ids]).tolist():
        classes[matched[number]] = names.get(number, str(number))
    return classes


def checkpoint_id(checkpoint: Path) -> str:
    """Return the short hash that identifies the state of a model in runs, bundles and names."""
    return sha256(checkpoint)[:_ID_DIGITS]
