"""Fit of an image to its cluster: `typical`, `unusual` or `outlier`.

The limits are the fences of a box plot, drawn for every cluster around the images that it was found in: beyond the
inner fence an image is unusual, beyond the outer one it is an outlier. Distances are those of directions, 1 - cosine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]
    Floats = NDArray[np.float32]

Fit = Literal["typical", "unusual", "outlier"]
FITS: tuple[Fit, ...] = get_args(Fit)
_INNER_FENCE, _OUTER_FENCE = 1.5, 3.0  # interquartile ranges beyond a quartile, as Tukey drew them
_MIN_OWN_IMAGES = 12  # clusters with fewer images use the quartiles of all clusters


@dataclass(frozen=True)
class FitLimits:
    """Limits of each cluster: its mean direction [C, d], and limits [C] of distance and log odds."""

    centres: Floats
    unusual_distance: Floats
    outlier_distance: Floats
    unusual_odds: Floats

    def judge(self, embeddings: Floats, cluster_ids: Ids, confidences: Floats) -> Ids:
        """Return indices into `FITS` [N]. Low confidence alone makes no outlier: the image may lie between clusters."""
        distances = _distances(embeddings, self.centres[cluster_ids])
        unusual = (distances > self.unusual_distance[cluster_ids]) | (
            log_odds(confidences) < self.unusual_odds[cluster_ids]
        )
        return np.where(distances > self.outlier_distance[cluster_ids], 2, unusual).astype(np.int64)


def calibrate(embeddings: Floats, cluster_ids: Ids, confidences: Floats, *, clusters: int) -> FitLimits:
    """Return the limits from the images that the clusters were found in."""
    units = directions(embeddings)
    centres = np.stack([directions(units[cluster_ids == number].sum(0)) for number in range(clusters)])
    distances = _distances(embeddings, centres[cluster_ids])
    odds = log_odds(confidences)
    limits = np.empty((3, clusters), np.float32)
    for number in range(clusters):
        mine = cluster_ids == number
        if mine.sum() < _MIN_OWN_IMAGES:
            mine = np.ones_like(mine)
        limits[0, number] = _fence(distances[mine], _INNER_FENCE)
        limits[1, number] = _fence(distances[mine], _OUTER_FENCE)
        limits[2, number] = -_fence(-odds[mine], _INNER_FENCE)
    return FitLimits(centres, *limits)


def log_odds(confidences: Floats) -> Floats:
    """Return log odds of probabilities: confidences crowd below 1, where their quartiles carry no information."""
    clipped = np.clip(confidences.astype(np.float64), 1e-6, 1 - 1e-6)
    odds: Floats = np.log(clipped / (1 - clipped)).astype(np.float32)
    return odds


def _fence(values: Floats, reach: float) -> float:
    lower, upper = np.quantile(values, (0.25, 0.75))
    return float(upper + reach * (upper - lower))


def directions(vectors: Floats) -> Floats:
    """Return vectors [..., d] scaled to length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _distances(embeddings: Floats, centres: Floats) -> Floats:
    distances: Floats = 1 - (directions(embeddings) * centres).sum(-1)
    return distances
