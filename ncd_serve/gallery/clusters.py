"""Facts about each cluster: central images, doubtful images, and nearest clusters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.fit import FITS, directions

if TYPE_CHECKING:
    from ncd_serve.gallery.collection import Collection, Floats, Ids

CENTRAL, DOUBTFUL = 16, 6  # images that a cluster is introduced by, at most
_DOUBTFUL_SHARE = 4  # one in four images of a small cluster
_NEAREST = 4
_MAIN_CLASSES = 5


@dataclass(frozen=True)
class Cluster:
    """One cluster, with its images (rows of the collection) in the order in which they are shown."""

    number: int
    count: int  # images, shown or not
    images: list[int]  # `introduced` of them, then the others, the central ones first
    introduced: tuple[int, int]  # how many of the first are the most central, and how many then the least certain
    confidence: float  # mean
    nearest: list[tuple[int, float]]  # other clusters, with cosine or with the share of images that doubt between them
    known: tuple[str, float] | None  # the known class that most images resemble, and how many do
    truths: list[tuple[str, int]]  # true classes, the most frequent first
    fits: list[int] | None  # images of each of `FITS`

    @property
    def purity(self) -> float | None:
        """Share of the most frequent true class."""
        return self.truths[0][1] / len(self.images) if self.truths else None


def describe_clusters(shown: Collection) -> tuple[list[Cluster], Floats]:
    """Return the clusters that have images, the largest first, and the centrality of each image in its cluster [N]."""
    centres = _centres(shown)
    central = _centrality(shown, centres)
    numbers = [int(number) for number in np.unique(shown.cluster_ids)]
    clusters = [
        _describe_cluster(shown, number, central, _nearest(shown, number, numbers, centres)) for number in numbers
    ]
    return sorted(clusters, key=lambda cluster: (-cluster.count, cluster.number)), central


def _describe_cluster(shown: Collection, number: int, central: Floats, nearest: list[tuple[int, float]]) -> Cluster:
    rows = np.flatnonzero(shown.cluster_ids == number)
    fits = np.bincount(shown.fits[rows], minlength=len(FITS)).tolist() if shown.fits is not None else None
    images, introduced = _arrange(rows, central[rows], shown.confidences[rows])
    return Cluster(
        number=number,
        count=int(shown.counts[number]),
        images=images,
        introduced=introduced,
        confidence=float(shown.confidences[rows].mean()),
        nearest=nearest,
        known=_resembles(shown, number),
        truths=Counter(shown.truth[row] for row in rows).most_common(_MAIN_CLASSES) if shown.truth else [],
        fits=fits,
    )


def _arrange(rows: Ids, central: Floats, confidences: Floats) -> tuple[list[int], tuple[int, int]]:
    by_doubt = rows[np.argsort(confidences, kind="stable")]
    doubtful = by_doubt[: min(DOUBTFUL, len(rows) // _DOUBTFUL_SHARE)]
    by_centre = rows[np.argsort(-central, kind="stable")]
    others = by_centre[~np.isin(by_centre, doubtful)]
    order = np.concatenate([others[:CENTRAL], doubtful, others[CENTRAL:]])
    return order.tolist(), (min(CENTRAL, len(others)), len(doubtful))


def _centres(shown: Collection) -> Floats | None:
    """Return the mean directions of all clusters [C, d], in training if known; zeros for a cluster without images."""
    if shown.embeddings is None or shown.centres is not None:
        return shown.centres
    sums = np.zeros((len(shown.counts), shown.embeddings.shape[1]), np.float32)
    np.add.at(sums, shown.cluster_ids, directions(shown.embeddings))
    return directions(sums)


def _centrality(shown: Collection, centres: Floats | None) -> Floats:
    """Return the cosine with the cluster's centre, or the confidence if there are no embeddings."""
    if centres is None or shown.embeddings is None:
        return shown.confidences
    central: Floats = (directions(shown.embeddings) * centres[shown.cluster_ids]).sum(1)
    return central


def _nearest(shown: Collection, number: int, numbers: list[int], centres: Floats | None) -> list[tuple[int, float]]:
    if centres is not None:
        others = np.array([other for other in numbers if other != number], np.int64)
        cosines = centres[others] @ centres[number]
        return [(int(others[near]), float(cosines[near])) for near in np.argsort(-cosines, kind="stable")[:_NEAREST]]
    if shown.rivals is None:
        return []
    rivals = shown.rivals[shown.cluster_ids == number]
    return [
        (int(other), count / len(rivals))
        for other, count in Counter(rivals[rivals >= 0].tolist()).most_common(_NEAREST)
    ]


def _resembles(shown: Collection, number: int) -> tuple[str, float] | None:
    known = shown.known_ids.get(number)
    if known is None or not len(known) or not shown.known_classes:
        return None
    likest, count = Counter(known.tolist()).most_common(1)[0]
    return shown.known_classes[likest], count / len(known)
