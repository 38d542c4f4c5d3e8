"""Clusters of features in the geometry that the known classes teach. Pure functions of tensors; not in the paper.

Features vary within a class in directions that mean nothing (pose, background). The known classes show which ones:
there the features are squeezed, so that what is left between two images is more likely a difference of class. Classes
are taken to be about equally large: plain k-means lets few clusters swallow many classes.
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

_ROUNDS = 15  # of assignment and new centres; later ones change nothing
_BALANCING = 3
_EPSILON = 1e-12
_EXACT_COLUMNS = (
    4096  # up to so many clusters of all clusterings together, eigenvectors are computed without a shortcut
)
_KEPT_SHARES = 16  # of an image in each clustering, beyond that


def class_whitening(features: Tensor, labels: Tensor, *, shrinkage: float) -> Tensor:
    """Transform [d, d] after which the labelled classes vary alike in all directions within themselves.

    The inverse square root of the within-class covariance of `features` [N, d], shrunk towards a multiple of identity.
    """
    sums = features.new_zeros(int(labels.max()) + 1, features.shape[1]).index_add_(0, labels, features)
    means = sums / torch.bincount(labels).clamp_min(1).unsqueeze(1)
    rest = (features - means[labels]).double()
    covariance = rest.T @ rest / len(rest)
    mean_variance = covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.double)
    values, vectors = torch.linalg.eigh((1.0 - shrinkage) * covariance + shrinkage * mean_variance)
    return (vectors * values.clamp_min(_EPSILON).rsqrt() @ vectors.T).float()


def main_directions(features: Tensor, dims: int) -> Tensor:
    """Unit rows of the first `dims` principal components."""
    centred = features - features.mean(dim=0)
    _, vectors = torch.linalg.eigh((centred.T @ centred).double())
    return F.normalize(centred @ vectors[:, -dims:].float(), dim=1)


def balanced_assignment(scores: Tensor, *, temperature: float) -> Tensor:
    """Scores [M, C] to rows that sum to 1 while all clusters weigh alike (Sinkhorn's algorithm)."""
    shares = (scores - scores.amax(dim=1, keepdim=True)).div_(temperature).double().exp_()
    for _ in range(_BALANCING):
        shares /= shares.sum(dim=0).clamp_min(_EPSILON)
        shares /= shares.sum(dim=1, keepdim=True)
    return shares.float()


def refined_assignment(directions: Tensor, shares: Tensor, *, temperature: float, rounds: int = _ROUNDS) -> Tensor:
    """Spherical k-means with balanced soft assignments, from a first assignment [M, C] of unit rows."""
    for _ in range(rounds):
        centres = F.normalize(shares.T @ directions, dim=1)
        shares = balanced_assignment(directions @ centres.T, temperature=temperature)
    return shares


def consensus_assignment(spaces: list[Tensor], clusters: int, *, temperature: float, starts: int, seed: int) -> Tensor:
    """The agreement of many clusterings of the same images: unit rows in one or several spaces to [M, C].

    Two images are alike when the clusterings put them together; the main directions of that likeness are clustered.
    """
    starting = [(space, seed + start) for space in spaces for start in range(starts)]
    clusterings = (_from_kmeans(space, clusters, temperature, number) for space, number in starting)
    if len(starting) * clusters <= _EXACT_COLUMNS:
        likeness = _main_likeness(torch.cat([*clusterings], dim=1), clusters)
    else:
        likeness = _approximate_likeness(clusterings, clusters, seed=seed)
    return _from_kmeans(F.normalize(likeness, dim=1), clusters, temperature, seed)


def _main_likeness(votes: Tensor, dims: int) -> Tensor:
    """The main directions of votes [M, S*C], i.e. of S clusterings side by side, for each image: [M, dims]."""
    _, vectors = torch.linalg.eigh((votes.T @ votes).double())
    return votes @ vectors[:, -dims:].float()


def _approximate_likeness(clusterings: Iterable[Tensor], dims: int, *, seed: int) -> Tensor:
    """The same of clusterings [M, C] each, in memory that grows with M * C: of each vote the largest shares are kept.

    A thousand clusters by thirty clusterings would be a matrix of 30,000 x 30,000 numbers to find eigenvectors of.
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
