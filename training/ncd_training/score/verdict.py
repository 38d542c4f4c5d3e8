"""Quality of a clustering from what is known without true novel classes. Pure functions; no labels but known ones.

Training on clusters moves their images together, whatever they show. So the verdict asks the trunk, which has learned
nothing of the clusters: are images nearer to their own cluster than to any other, and how many classes do they look
like? Both together predict ACC; `benchmarks/verdict.py` compares the prediction with the truth. What the trained
embedding shows (clusters that stand apart, pairs that do not, other ways to cluster) is for the words and the report.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering

from ncd_serve.fit import FITS, calibrate, directions
from ncd_serve.verdict import Verdict, likeness
from ncd_training.config.schema import SelfLabelConfig
from ncd_training.model.predict import Floats, Ids, Outputs
from ncd_training.objective.class_cuts import class_orders, count_classes, cut_trees
from ncd_training.objective.clustering import class_whitening, kmeans_ids, sizes_look_equal
from ncd_training.score.metrics import cluster_accuracy
from ncd_training.score.pair_quality import sample_rows
from ncd_training.score.reference import Labelled

_MAX_IMAGES = 2000  # of each kind: distances, Ward's tree and k-means take a second or two
_SHRINKAGE = 0.1  # as in the settings of self labels
_STARTS = 3  # of k-means
_DRAWS = 4  # of the half of the known classes that is held back
_CUT_DRAWS = 5  # of known classes that are probes; odd, for a median
_MAX_TREE_IMAGES = 1000
_MIN_KNOWN_CLASSES = 4  # half of them are clustered, the others show how classes vary
# Of 346 clusters in 23 runs (split 0 of benchmarks/verdict.py), those with this silhouette have a mean purity of 0.73,
# the others of 0.43. Pairs of clusters of which a quarter of the images are nearer to the other one are mostly of one
# class, or of classes that the features do not tell apart.
_TIGHT = 0.02
_ALIKE = 0.25


class Weights(NamedTuple):
    """Coefficients of the expected ACC."""

    constant: float
    settled: float


# Least squares on 23 runs, split 0 of benchmarks/verdict.py; docs/benchmarks/verdict.md has figures on data left out.
WEIGHTS = Weights(0.11, 0.75)


class Separation(NamedTuple):
    """Separation of clusters: silhouette of every image [m], and the nearest other cluster of every image [m]."""

    silhouettes: NDArray[np.float64]
    nearest: Ids


def judge(
    outputs: Outputs, labelled: Labelled, *, known_clusters: int = 0, taught: bool = False, seed: int
) -> Verdict | None:
    """Return the verdict on the clusters of unlabelled images; None for a model that has diverged.

    `known_clusters`: the first clusters are this many known classes (an open-world head). `taught`: the trunk has
    learned the known classes, which then say nothing about the number of others.
    """
    if not (np.isfinite(outputs.embedding).all() and np.isfinite(labelled.embedding).all()):
        return None
    rows = sample_rows(len(outputs.cluster_ids), seed=seed, at_most=_MAX_IMAGES)
    some = sample_rows(len(labelled.classes), seed=seed, at_most=_MAX_IMAGES)
    known = labelled.embedding[some], labelled.classes[some]
    places, ids = _places(outputs.embedding[rows], known), outputs.cluster_ids[rows]
    apart, untrained = separation(places, ids), _places(outputs.trunk[rows], (labelled.trunk[some], known[1]))
    settled = float((separation(untrained, ids).silhouettes > 0).mean())
    present = np.unique(ids).tolist()
    limits = calibrate(outputs.embedding, outputs.cluster_ids, outputs.confidences, clusters=outputs.clusters)
    fits = limits.judge(outputs.embedding, outputs.cluster_ids, outputs.confidences)
    clusters = len(np.unique(outputs.cluster_ids))
    classes = None if taught else number_of_classes(outputs, labelled, known_clusters=known_clusters, seed=seed)
    return Verdict(
        images=len(outputs.cluster_ids),
        clusters=clusters,
        classes=classes,
        expected=expected_accuracy(settled, likeness(clusters, classes)),
        settled=settled,
        silhouette=float(apart.silhouettes.mean()),
        known_score=known_score(*known, seed=seed),
        agreement=_agreement(places, ids, seed),
        tight=[number for number in present if apart.silhouettes[ids == number].mean() >= _TIGHT],
        alike=alike_pairs(ids, apart),
        empty=np.setdiff1d(np.arange(known_clusters, outputs.clusters), outputs.cluster_ids).tolist(),
        nowhere=int((fits == FITS.index("outlier")).sum()),
    )


def expected_accuracy(settled: float, likeness: float, weights: Weights = WEIGHTS) -> float:
    """Return the ACC, between 0 and 1, that the share of settled images and the numbers of clusters let expect.

    With fewer clusters than classes, or more, some images cannot be right: `likeness` is the smaller number divided by
    the larger one. Its root is closer to the truth than itself.
    """
    return min(max(weights.constant + weights.settled * settled, 0.0), 1.0) * likeness**0.5


def separation(places: Floats, ids: Ids) -> Separation:
    """Return silhouettes by cosine of unit rows [m, d]: (b - a) / max(a, b).

    a is the mean distance to the other images of the cluster, b to those of the nearest other cluster. Images alone in
    their cluster, or with no other cluster, have 0.
    """
    present, own = np.unique(ids, return_inverse=True)
    sizes, rows = np.bincount(own), np.arange(len(ids))
    sums = np.zeros((len(present), places.shape[1]))
    np.add.at(sums, own, places)
    distances = 1 - places @ (sums / sizes[:, None]).T
    others = np.maximum(sizes[own] - 1, 1)
    inside = 1 - ((places * sums[own]).sum(1) - (places**2).sum(1)) / others
    if len(present) == 1:
        return Separation(np.zeros(len(ids)), ids)
    distances[rows, own] = np.inf
    nearest = distances.argmin(1)
    outside = distances[rows, nearest]
    silhouettes = (outside - inside) / np.maximum(np.maximum(inside, outside), 1e-12)
    return Separation(np.where(sizes[own] > 1, silhouettes, 0.0), present[nearest])


def alike_pairs(ids: Ids, apart: Separation) -> list[tuple[int, int]]:
    """Return pairs of clusters whose images are often nearer to the other one, the most alike first.

    A pair counts if the mean of both clusters' shares of such images is a quarter or more.
    """
    size = int(max(ids.max(), apart.nearest.max())) + 1
    nearer, counts = apart.silhouettes < 0, np.zeros((size, size))
    np.add.at(counts, (ids[nearer], apart.nearest[nearer]), 1)
    shares = counts / np.maximum(np.bincount(ids, minlength=size), 1)[:, None]
    together = np.triu((shares + shares.T) / 2, k=1)
    found = [(int(one), int(other)) for one, other in np.argwhere(together >= _ALIKE)]
    return sorted(found, key=lambda pair: -together[pair])


def known_score(embedding: Floats, classes: Ids, *, seed: int) -> float | None:
    """Return the ACC of k-means on known classes that are held back, mean over draws; None for too few classes."""
    known = np.unique(classes)
    if len(known) < _MIN_KNOWN_CLASSES:
        return None
    rng, scores = np.random.default_rng(seed), []
    for _ in range(_DRAWS):
        held = np.isin(classes, rng.permutation(known)[: len(known) // 2])
        places = _places(embedding[held], (embedding[~held], classes[~held]))
        _, truth = np.unique(classes[held], return_inverse=True)
        scores.append(cluster_accuracy(kmeans_ids(places, len(known) // 2, seed=seed, starts=_STARTS), truth))
    return float(np.mean(scores))


def number_of_classes(outputs: Outputs, labelled: Labelled, *, known_clusters: int, seed: int) -> int | None:
    """Return about how many classes the unlabelled images show; None for too few known classes or images.

    Trees of the trunk's features are cut: no clustering has changed these. Known classes that the model has recognised
    count as they are.
    """
    present, classes = np.unique(labelled.classes, return_inverse=True)
    novel = np.flatnonzero(outputs.cluster_ids >= known_clusters)
    # Of both kinds the same share: the height of a class in a tree depends on its number of images.
    rows = np.random.default_rng(seed).permutation(novel)[: round(labelled.share * len(novel))]
    if len(present) < _MIN_KNOWN_CLASSES or np.bincount(classes).min() < 2 or len(rows) < 2:
        return None
    features = torch.from_numpy(np.concatenate([labelled.trunk, outputs.trunk[rows]]))
    orders = class_orders(len(present), draws=_CUT_DRAWS, seed=seed)
    cuts = cut_trees(features, classes, orders, SelfLabelConfig(), seed=seed, at_most=_MAX_TREE_IMAGES)
    recognised = np.unique(outputs.cluster_ids[outputs.cluster_ids < known_clusters])
    equal = sizes_look_equal(torch.from_numpy(classes), len(present))
    return len(recognised) + count_classes(cuts, equal=equal).classes


def _agreement(places: Floats, ids: Ids, seed: int) -> float:
    """Return the mean ACC of k-means and of Ward's linkage against the clusters of the model."""
    clusters = len(np.unique(ids))
    if clusters == 1:
        return 1.0
    ward: Ids = AgglomerativeClustering(clusters, linkage="ward").fit_predict(places)
    others = kmeans_ids(places, clusters, seed=seed, starts=_STARTS), ward
    return float(np.mean([cluster_accuracy(found, ids) for found in others]))


def _places(embedding: Floats, known: tuple[Floats, Ids]) -> Floats:
    """Return unit rows around the mean of the images, in the geometry of known classes if there are any."""
    moved = embedding
    if len(known[1]):
        classes = np.unique(known[1], return_inverse=True)[1]
        transform = class_whitening(torch.from_numpy(known[0]), torch.from_numpy(classes), shrinkage=_SHRINKAGE)
        moved = embedding @ transform.numpy()
    return directions(moved - moved.mean(0))
