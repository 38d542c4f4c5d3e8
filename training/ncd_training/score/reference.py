"""Outputs of a trained model for the unlabelled images, as gallery, fit and drift use them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ncd_serve.files import sha256
from ncd_serve.mixture import fit_mixture
from ncd_serve.reference import Reference
from ncd_training.base.matching import matched_clusters
from ncd_training.model.predict import run_model

if TYPE_CHECKING:
    from ncd_serve.preprocess import PreprocessSpec
    from ncd_serve.progress import Track
    from ncd_training.data.manifest import Manifest
    from ncd_training.model.branches import DualBranchModel
    from ncd_training.model.predict import Floats, Ids, Outputs

_ID_DIGITS = 12  # of the SHA-256 hash of a checkpoint
_MAX_LABELLED_IMAGES = 4000  # enough for means and covariance of the known classes


class Labelled(NamedTuple):
    """Features and classes of labelled images."""

    embedding: Floats  # [N, d]
    classes: Ids  # [N]
    trunk: Floats  # [N, c] as of `Outputs`
    share: float = 1.0  # of all labelled images that are here


def embed_labelled(
    model: DualBranchModel, manifest: Manifest, spec: PreprocessSpec, *, workers: int, track: Track
) -> Labelled:
    """Return features and classes of labelled images, of an even sample if there are many."""
    if not manifest.labelled:
        nothing = np.zeros((0, model.dim), np.float32)
        return Labelled(nothing, np.zeros(0, np.int64), nothing)
    some = manifest.labelled[:: -(-len(manifest.labelled) // _MAX_LABELLED_IMAGES)]
    what = "evaluating labelled images"
    outputs = run_model(model, [path for path, _ in some], spec, workers=workers, track=track, what=what)
    classes = np.array([label for _, label in some])
    return Labelled(outputs.embedding, classes, outputs.trunk, len(some) / len(manifest.labelled))


def to_reference(
    outputs: Outputs,
    labelled: Labelled,
    manifest: Manifest,
    *,
    checkpoint: Path,
    clusters_are_classes: bool = False,
) -> Reference:
    """Return the outputs for the unlabelled images of the state in `checkpoint`, as a run and a bundle keep them.

    With the labelled images, all classes become a mixture. `clusters_are_classes`: the first clusters are the known
    classes (an open-world head).
    """
    files = [path.absolute() for path in manifest.unlabelled]
    root = Path(os.path.commonpath([file.parent for file in files]))
    names = dict(enumerate(manifest.novel_names))
    reference = Reference(
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
    embeddings = np.concatenate([labelled.embedding, reference.embeddings])
    classes = np.concatenate([labelled.classes, reference.first_cluster + reference.cluster_ids])
    number = reference.first_cluster + reference.clusters
    if not np.isfinite(embeddings).all():  # a diverged run, which export refuses
        return reference
    known = len(manifest.known_classes)
    share = float((reference.cluster_ids < known).mean()) if clusters_are_classes else None
    mixture = fit_mixture(embeddings, classes, number=number, known=known, open_world_share=share)
    places = mixture.project(labelled.embedding).astype(np.float32)
    return replace(reference.with_mixture(mixture), known_places=places, known_place_ids=labelled.classes)


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
