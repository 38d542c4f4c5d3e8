"""Clustering of features in the geometry of the known classes. Pure functions of tensors; not in the paper.

Within a class, features vary in directions that do not matter (pose, background). The known classes show these
directions. Features are scaled down along them, so that the remaining distance between two images is more likely a
difference of class. Clusters are kept about equally large: in plain k-means, few clusters swallow many classes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array, hstack
from sklearn.cluster import KMeans
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

_ROUNDS = 15  # of assignment and new centres; more rounds change nothing
_BALANCING_ROUNDS = 3
_EPSILON = 1e-12
# Up to this many clusters of all clusterings together, eigenvectors are exact. Beyond, they are approximated from the
# largest shares of each image in each clustering.
_MAX_EXACT_COLUMNS = 4096
_KEPT_SHARES = 16


def class_whitening(features: Tensor, labels: Tensor, *, shrinkage: float) -> Tensor:
    """Return a transform [d, d] after which the labelled classes vary equally in all directions within themselves.

    It is the inverse square root of the within-class covariance of `features` [N, d], shrunk towards a multiple of the
    identity.
    """
    sums = features.new_zeros(int(labels.max()) + 1, features.shape[1]).index_add_(0, labels, features)
    means = sums / torch.bincount(labels).clamp_min(1).unsqueeze(1)
    rest = (features - means[labels]).double()
    covariance = rest.T @ rest / len(rest)
    mean_variance = covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.double)
    values, vectors = torch.linalg.eigh((1.0 - shrinkage) * covariance + shrinkage * mean_variance)
    return (vectors * values.clamp_min(_EPSILON).rsqrt() @ vectors.T).float()


def main_directions(features: Tensor, dims: int) -> Tensor:
    """Return the first `dims` principal components of features, as unit rows."""
    centred = features - features.mean(dim=0)
    _, vectors = torch.linalg.eigh((centred.T @ centred).double())
    return F.normalize(centred @ vectors[:, -dims:].float(), dim=1)


def balanced_assignment(scores: Tensor, *, temperature: float) -> Tensor:
    """Turn scores [M, C] into rows that sum to 1, with equal weight of all clusters (Sinkhorn's algorithm)."""
    shares = (scores - scores.amax(dim=1, keepdim=True)).div_(temperature).double().exp_()
    for _ in range(_BALANCING_ROUNDS):
        shares /= shares.sum(dim=0).clamp_min(_EPSILON)
        shares /= shares.sum(dim=1, keepdim=True)
    return shares.float()


def refined_assignment(directions: Tensor, shares: Tensor, *, temperature: float, rounds: int = _ROUNDS) -> Tensor:
    """Run spherical k-means with balanced soft assignments, from a first assignment [M, C] of unit rows."""
    for _ in range(rounds):
        centres = F.normalize(shares.T @ directions, dim=1)
        shares = balanced_assignment(directions @ centres.T, temperature=temperature)
    return shares


def consensus_assignment(spaces: list[Tensor], clusters: int, *, temperature: float, starts: int, seed: int) -> Tensor:
    """Return the consensus [M, C] of many clusterings of the same images, given as unit rows in one or several spaces.

    Two images are similar if many clusterings put them together; the main directions of this similarity are clustered.
    """
    starting = [(space, seed + start) for space in spaces for start in range(starts)]
    clusterings = (_from_kmeans(space, clusters, temperature, number) for space, number in starting)
    if len(starting) * clusters <= _MAX_EXACT_COLUMNS:
        similarity = _main_similarity(torch.cat([*clusterings], dim=1), clusters)
    else:
        similarity = _approximate_similarity(clusterings, clusters, seed=seed)
    return _from_kmeans(F.normalize(similarity, dim=1), clusters, temperature, seed)


def _main_similarity(votes: Tensor, dims: int) -> Tensor:
    """Return the main directions [M, dims] of votes [M, S*C], i.e. of S clusterings side by side."""
    _, vectors = torch.linalg.eigh((votes.T @ votes).double())
    return votes @ vectors[:, -dims:].float()


def _approximate_similarity(clusterings: Iterable[Tensor], dims: int, *, seed: int) -> Tensor:
    """Approximate `_main_similarity` of clusterings [M, C] in memory that grows with M * C: keep the largest shares.

    For a thousand clusters in thirty clusterings, the exact computation has a matrix of 30,000 x 30,000 numbers.
    """
    votes = hstack([_largest_shares(shares) for shares in clusterings], format="csr")
    left, values, _ = randomized_svd(votes, dims, random_state=seed)
    return torch.from_numpy(left * values)


def _largest_shares(shares: Tensor) -> csr_array:
    images, clusters = shares.shape
    kept = shares.topk(min(_KEPT_SHARES, clusters), dim=1)
    starts = np.arange(images + 1) * kept.values.shape[1]
    return csr_array((kept.values.flatten().numpy(), kept.indices.flatten().int().numpy(), starts), shares.shape)


def _from_kmeans(directions: Tensor, clusters: int, temperature: float, seed: int) -> Tensor:
    ids = KMeans(clusters, n_init=1, random_state=seed).fit_predict(directions.numpy())
    first = F.one_hot(torch.from_numpy(ids).long(), clusters).float()
    return refined_assignment(directions, first, temperature=temperature)
