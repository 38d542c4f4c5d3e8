"""K-means with fixed clusters for some rows (semi-supervised k-means), and heads that are set to its centres.

Without such rows, it is plain k-means. All starts run in parallel: one matrix product computes the distances of all
rows to all centres of all starts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ncd_training.model.branches import Branch

FREE = -1  # marks a row without a fixed cluster
_TOLERANCE = 1e-4  # of the features' variance: centres that move less have converged (as in DTC and scikit-learn)
_MAX_ITERATIONS = 100


class Clusters(NamedTuple):
    """Clustering of the best of several starts."""

    ids: Tensor  # [N]
    centres: Tensor  # [K, d]
    inertia: float  # sum of squared distances of the rows to their centres


def constrained_kmeans(features: Tensor, fixed: Tensor, clusters: int, *, starts: int, seed: int) -> Clusters:
    """Cluster `features` [N, d]; `fixed` [N] holds the fixed cluster of each row, counted from 0, or FREE.

    Centres of fixed clusters start at the mean of their rows, the others by k-means++ among the free rows.
    """
    features = features - features.mean(dim=0)  # centred, so that distances from products lose no digits
    squares = features.square().sum(dim=1)
    settled = _TOLERANCE * float(squares.mean())
    centres = _first_centres(features, squares, fixed, clusters, starts=starts, seed=seed)
    for _ in range(_MAX_ITERATIONS):
        ids, _ = _assign(features, squares, fixed, centres)
        moved = _means(features, ids, centres)
        shift = (moved - centres).square().sum(dim=(1, 2)).max()
        centres = moved
        if shift <= settled:
            break
    ids, inertia = _assign(features, squares, fixed, centres)
    best = int(inertia.argmin())
    return Clusters(ids[best], centres[best], float(inertia[best]))


def _first_centres(
    features: Tensor, squares: Tensor, fixed: Tensor, clusters: int, *, starts: int, seed: int
) -> Tensor:
    """Return initial centres [starts, K, d]: those of fixed clusters, then greedy k-means++ among the free rows.

    A few rows are drawn with probabilities proportional to their squared distances from the centres so far; the one
    that reduces the inertia most becomes the next centre.
    """
    free, generator = (fixed == FREE).float(), torch.Generator().manual_seed(seed)
    named, held = int(fixed.max()) + 1, fixed != FREE
    centres = features.new_zeros(starts, clusters, features.shape[1])
    nearest = features.new_ones(starts, len(features))
    if named:
        centres[:, :named] = _means(features[held], fixed[held][None], centres[:1, :named])
        nearest = _distances(features, squares, centres[:, :named]).amin(dim=2)
    tries, every = 2 + int(math.log(clusters)), torch.arange(starts)
    for number in range(named, clusters):
        chances = nearest * free
        # If all rows coincide with a centre, any row may be drawn.
        chances = torch.where(chances.sum(dim=1, keepdim=True) > 0, chances, free)
        rows = torch.multinomial(chances, tries, replacement=True, generator=generator)
        distances = _distances(features, squares, features[rows])
        if number:
            distances = torch.minimum(distances, nearest.unsqueeze(2))
        best = distances.sum(dim=1).argmin(dim=1)
        centres[:, number], nearest = features[rows[every, best]], distances[every, :, best]
    return centres


def _assign(features: Tensor, squares: Tensor, fixed: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cluster of each row [starts, N], and the inertia of each start."""
    distances = _distances(features, squares, centres)
    ids = torch.where(fixed == FREE, distances.argmin(dim=2), fixed)
    return ids, distances.gather(2, ids.unsqueeze(2)).sum(dim=(1, 2))


def _distances(features: Tensor, squares: Tensor, centres: Tensor) -> Tensor:
    """Return squared distances [starts, N, K]."""
    products = features @ centres.transpose(1, 2)
    return (squares[:, None] - 2 * products + centres.square().sum(dim=2)[:, None]).clamp_min_(0)


def _means(features: Tensor, ids: Tensor, before: Tensor) -> Tensor:
    """Return the mean of the rows of each cluster; a cluster without rows keeps its centre."""
    means = torch.zeros_like(before)
    for mean, mine in zip(means, ids, strict=True):
        mean.index_add_(0, mine, features)
    sizes = torch.stack([torch.bincount(mine, minlength=before.shape[1]) for mine in ids]).unsqueeze(2)
    return torch.where(sizes > 0, means / sizes.clamp_min(1), before)


@torch.no_grad()
def pile_ids(branch: Branch, features: Tensor, labels: Tensor, *, starts: int, seed: int) -> Tensor:
    """Return the output of the cluster head [M] that each unlabelled image belongs to, by k-means on unit rows.

    `features` are those of images with these `labels`, then of the unlabelled ones. In an open world, labelled images
    stay with their class; otherwise no unlabelled image shows a known class, and labelled images do not matter.
    """
    rows, width = F.normalize(features, dim=1), branch.linear_cluster_head.out_features
    fixed = torch.full((len(rows),), FREE)
    fixed[: len(labels)] = labels
    first = 0 if branch.known_head is None else len(labels)
    found = constrained_kmeans(rows[first:], fixed[first:], width, starts=starts, seed=seed)
    return found.ids[len(labels) - first :]


@torch.no_grad()
def centre_heads(branch: Branch, features: Tensor, labels: Tensor, ids: Tensor) -> None:
    """Set cosine heads to the directions of the known classes and of the clusters `ids` of the unlabelled images."""
    rows = F.normalize(features, dim=1)
    pile = class_sums(rows[len(labels) :], ids, branch.linear_cluster_head.out_features)
    if branch.known_head is None:
        branch.linear_cluster_head.weight.copy_(pile + class_sums(rows[: len(labels)], labels, len(pile)))
        return
    branch.linear_cluster_head.weight.copy_(pile)
    branch.known_head.weight.copy_(class_sums(rows[: len(labels)], labels, branch.known))


def class_sums(rows: Tensor, ids: Tensor, classes: int) -> Tensor:
    """Return the sum of the rows of each class [classes, d]."""
    return rows.new_zeros(classes, rows.shape[1]).index_add_(0, ids, rows)
