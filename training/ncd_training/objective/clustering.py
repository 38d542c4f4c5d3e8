"""Clusters of features in the geometry that the known classes teach. Pure functions of tensors; not in the paper.

Features vary within a class in directions that mean nothing (pose, background). The known classes show which ones:
there the features are squeezed, so that what is left between two images is more likely a difference of class. Classes
are taken to be about equally large: plain k-means lets few clusters swallow many classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import Tensor

_ROUNDS = 15  # of assignment and new centres; later ones change nothing
_BALANCING = 3
_EPSILON = 1e-12


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
    shares = ((scores - scores.amax(dim=1, keepdim=True)) / temperature).double().exp()
    for _ in range(_BALANCING):
        shares = shares / shares.sum(dim=0).clamp_min(_EPSILON)
        shares = shares / shares.sum(dim=1, keepdim=True)
    return shares.float()


def refined_assignment(directions: Tensor, shares: Tensor, *, temperature: float, rounds: int = _ROUNDS) -> Tensor:
    """Spherical k-means with balanced soft assignments, from a first assignment [M, C] of unit rows."""
    for _ in range(rounds):
        centres = F.normalize(shares.T @ directions, dim=1)
        shares = balanced_assignment(directions @ centres.T, temperature=temperature)
    return shares


def consensus_assignment(spaces: list[Tensor], clusters: int, *, temperature: float, starts: int, seed: int) -> Tensor:
    """What many clusterings of the same images agree on: unit rows in one or several spaces to [M, C].

    Two images are alike when the clusterings put them together; the main directions of that likeness are clustered.
    """
    starting = [(space, seed + start) for space in spaces for start in range(starts)]
    votes = torch.cat([_from_kmeans(space, clusters, temperature, number) for space, number in starting], dim=1)
    _, vectors = torch.linalg.eigh((votes.T @ votes).double())
    return _from_kmeans(F.normalize(votes @ vectors[:, -clusters:].float(), dim=1), clusters, temperature, seed)


def _from_kmeans(directions: Tensor, clusters: int, temperature: float, seed: int) -> Tensor:
    ids = KMeans(clusters, n_init=1, random_state=seed).fit_predict(directions.numpy())
    first = F.one_hot(torch.from_numpy(ids).long(), clusters).float()
    return refined_assignment(directions, first, temperature=temperature)
