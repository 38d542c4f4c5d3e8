"""Scores of a clustering. True novel classes are used here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.progress import Track
from ncd_training.base.matching import matched_clusters
from ncd_training.base.run_dir import ClassScore, Score
from ncd_training.data.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN, Manifest
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.predict import Ids, Outputs, run_model

_PIXEL_SIDE = 32
# Protocols of accuracy in an open world.
PAPER, ONE_MATCHING = " images, paper's protocol", " images, one matching"
JOINT = ", joint head"  # suffix of splits that a head over known and novel classes was scored on


def cluster_accuracy(predicted: Ids, true: Ids) -> float:
    """Return ACC, the share of images in the cluster that their class is matched with."""
    return float((matched_clusters(predicted, true)[true] == predicted).mean())


def class_rows(predicted: Ids, true: Ids, names: Sequence[str], matched: Ids) -> list[ClassScore]:
    """Return for each true class its name (or number), its images, its cluster, and the share of images in it."""
    rows = []
    for number in np.unique(true):
        mine = predicted[true == number]
        rows.append(
            ClassScore(
                name=names[number] if number < len(names) else str(number),
                images=len(mine),
                cluster=int(matched[number]),
                share=float((mine == matched[number]).mean()),
            )
        )
    return rows


def cluster_scores(predicted: Ids, true: Ids) -> Score:
    """Return ACC, NMI and ARI."""
    return Score(
        images=len(true),
        acc=cluster_accuracy(predicted, true),
        nmi=float(normalized_mutual_info_score(true, predicted)),
        ari=float(adjusted_rand_score(true, predicted)),
    )


def cluster_balance(predicted: Ids, clusters: int) -> float:
    """Return the entropy of the cluster sizes over its maximum: 1 if all are equally large, 0 if one has all images."""
    shares = np.bincount(predicted, minlength=clusters) / len(predicted)
    present = shares[shares > 0]
    return float(-(present * np.log(present)).sum() / np.log(clusters))


def evaluate_splits(
    model: DualBranchModel,
    manifest: Manifest,
    spec: PreprocessSpec,
    unlabelled: Outputs,
    *,
    workers: int,
    track: Track,
) -> dict[str, Score]:
    """Return the scores of every split that has true classes, each with a row for every true class."""
    scores: dict[str, Score] = {}

    def outputs(paths: Sequence[Path], split: str) -> Outputs:
        return run_model(model, paths, spec, workers=workers, track=track, what=f"evaluating {split}")

    if manifest.truth is not None:
        ids = unlabelled.cluster_ids
        scores[UNLABELLED_TRAIN] = _with_classes(ids, np.array(manifest.truth), manifest)
        if manifest.open_world:
            scores |= open_world_scores(
                ids, np.array(manifest.truth), known=len(manifest.known_classes), named=model.tells_known_from_novel
            )
    if manifest.novel_test:
        paths, novel_truth = zip(*manifest.novel_test, strict=True)
        novel = outputs(paths, NOVEL_TEST)
        scores[NOVEL_TEST] = _with_classes(novel.cluster_ids, np.array(novel_truth), manifest)
    if manifest.known_test:
        paths, known_truth = zip(*manifest.known_test, strict=True)
        known = outputs(paths, KNOWN_TEST)
        scores[KNOWN_TEST] = known_scores(known.known_ids, np.array(known_truth), manifest.known_classes)
    if manifest.known_test and manifest.novel_test and model.tells_known_from_novel:
        scores |= joint_scores(
            (known.known_ids, np.array(known_truth)),
            (novel.known_ids, np.array(novel_truth)),
            classes=len(manifest.known_classes),
        )
    return scores


def known_scores(predicted: Ids, true: Ids, names: Sequence[str]) -> Score:
    """Return the accuracy of the known head, which needs no matching."""
    rows = class_rows(predicted, true, names, np.arange(true.max() + 1))
    classes = [row.model_copy(update={"cluster": None}) for row in rows]
    return Score(images=len(true), acc=float((predicted == true).mean()), classes=classes)


def joint_scores(known: tuple[Ids, Ids], novel: tuple[Ids, Ids], *, classes: int) -> dict[str, Score]:
    """Return the accuracy of a head over known and novel classes from predicted and true ids of images of both.

    The `classes` known classes have the first ids. A novel image that is predicted as known counts as wrong.
    """
    predicted, true = novel
    called_novel = predicted >= classes
    right = np.zeros(len(true), bool)
    if called_novel.any():
        clusters = predicted[called_novel] - classes
        matched = matched_clusters(clusters, true[called_novel])
        right[called_novel] = matched[true[called_novel]] == clusters
    hits = {KNOWN_TEST: known[0] == known[1], NOVEL_TEST: right}
    hits["all-test"] = np.concatenate([*hits.values()])
    return {f"{split}{JOINT}": Score(images=len(hit), acc=float(hit.mean())) for split, hit in hits.items()}


def open_world_scores(predicted: Ids, true: Ids, *, known: int, named: bool) -> dict[str, Score]:
    """Return the accuracy on seen, novel and all unlabelled images of an open world, under both protocols in use.

    The paper's (ORCA's) matches clusters on novel images only, then on all; seen classes are not matched if the head
    has names for them (`named`), else on seen images only. The newer protocol matches once, on all images.
    """
    seen = true < known
    groups = {"seen": seen, "novel": ~seen, "all": np.ones_like(seen)}
    once = matched_clusters(predicted, true)[true] == predicted
    scores: dict[str, Score] = {}
    for name, chosen in groups.items():
        if chosen.any():
            mine, theirs = predicted[chosen], true[chosen]
            apart = float((mine == theirs).mean()) if named and name == "seen" else cluster_accuracy(mine, theirs)
            for protocol, acc in ((PAPER, apart), (ONE_MATCHING, float(once[chosen].mean()))):
                scores[f"{UNLABELLED_TRAIN}, {name}{protocol}"] = Score(images=int(chosen.sum()), acc=acc)
    return scores


def _with_classes(predicted: Ids, true: Ids, manifest: Manifest) -> Score:
    rows = class_rows(predicted, true, manifest.novel_names, matched_clusters(predicted, true))
    return cluster_scores(predicted, true).model_copy(update={"classes": rows})


def raw_pixels(paths: Sequence[Path]) -> NDArray[np.float32]:
    """Return images as rows of pixel values; images larger than 32 px are shrunk to that."""
    spec = PreprocessSpec(resolution=_PIXEL_SIDE, resize=_PIXEL_SIDE)
    return np.stack([load_array(path, spec).ravel() for path in paths]).astype(np.float32) / 255
