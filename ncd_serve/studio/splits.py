"""Proposals to split a cluster: k-means on the directions of its embeddings, for two and three groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.fit import directions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]
    Floats = NDArray[np.float32]

_MOST_ROUNDS = 50
_SILHOUETTE_IMAGES = 1000  # a sample of more is enough for a mean
# The bands of Kaufman and Rousseeuw (1990) for the mean silhouette.
_BANDS = ((0.5, "clearly apart"), (0.25, "weakly apart"), (-1.0, "hardly apart: probably one category"))


@dataclass(frozen=True)
class Split:
    """Groups of a cluster's images, the largest first, and their mean silhouette."""

    groups: list[list[int]]
    silhouette: float

    @property
    def words(self) -> str:
        """The silhouette in words."""
        return next(words for limit, words in _BANDS if self.silhouette >= limit)


def propose_splits(embeddings: Floats) -> list[Split]:
    """Return the splits of images into two and into three groups, the better one first."""
    units = directions(embeddings)
    found = [split for count in (2, 3) if len(units) > count and (split := _split(units, count))]
    return sorted(found, key=lambda split: -split.silhouette)


def _split(units: Floats, count: int) -> Split | None:
    ids = spherical_kmeans(units, count)
    if len(np.unique(ids)) < count:
        return None
    groups = sorted((np.flatnonzero(ids == number).tolist() for number in range(count)), key=len, reverse=True)
    return Split(groups, silhouette(units, ids))


def spherical_kmeans(units: Floats, count: int) -> Ids:
    """Return the groups [N] of directions [N, d]; the first centres are far from each other, so there is no chance."""
    centres = [directions(units.sum(0))]
    for _ in range(count):
        centres.append(units[(units @ np.stack(centres).T).max(1).argmin()])
    chosen = np.stack(centres[1:])
    ids = (units @ chosen.T).argmax(1)
    for _ in range(_MOST_ROUNDS):
        chosen = np.stack([directions(units[ids == number].sum(0)) for number in range(count)])
        before, ids = ids, (units @ chosen.T).argmax(1)
        if np.array_equal(before, ids):
            break
    return ids.astype(np.int64)


def silhouette(units: Floats, ids: Ids) -> float:
    """Return the mean silhouette of groups by the distance 1 - cosine: 1 is far apart, 0 one cloud.

    An image alone in its group counts as 0.
    """
    step = -(-len(units) // _SILHOUETTE_IMAGES)
    units, ids = units[::step], ids[::step]
    distances = 1 - units @ units.T
    numbers, counts = np.unique(ids, return_counts=True)
    sums = np.stack([distances[:, ids == number].sum(1) for number in numbers], 1)  # [N, K]
    own = np.searchsorted(numbers, ids)
    rows = np.arange(len(ids))
    inside = sums[rows, own] / np.maximum(counts[own] - 1, 1)
    means = sums / counts
    means[rows, own] = np.inf
    outside = means.min(1)
    scores = (outside - inside) / np.maximum(np.maximum(inside, outside), 1e-12)
    return float(np.where(counts[own] > 1, scores, 0.0).mean())
