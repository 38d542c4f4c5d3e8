"""Clustering of features in the geometry of the known classes. Pure functions of tensors; not in the paper.

Within a class, features vary in directions that do not matter (pose, background). The known classes show these
directions. Features are scaled down along them, so that the remaining distance between two images is more likely a
difference of class.

Whether classes are equally large decides how to cluster. If they are, clusters that are kept equally large are far
better: in plain k-means, few clusters swallow many classes. If they are not, such clusters cut large classes into
pieces; then images are linked that many fine clusterings put together, which takes clusters of any size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import csr_array, hstack
from scipy.spatial.distance import squareform
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import randomized_svd
from threadpoolctl import threadpool_limits
from torch import Tensor

_ROUNDS = 15  # of assignment and new centres; more rounds change nothing
_BALANCING_ROUNDS = 3
_EPSILON = 1e-12
# Up to this many clusters of all clusterings together, eigenvectors are exact. Beyond, they are approximated from the
# largest shares of each image in each clustering.
_MAX_EXACT_COLUMNS = 4096
_KEPT_SHARES = 16
_FINENESS = 2  # clusters of each fine clustering for every cluster that is asked for
_LINKED_IMAGES = (5000, 10_000)  # least and most images that are linked; their distances are 12.5 to 50 million numbers
_LAST_ROUNDS = 3
_COSINE_SHARE = 0.3  # of the distance of linked images; chosen on known birds played as novel, in families and in kinds
_PARALLEL_DISTANCES = 1_000_000  # in a round of k-means, from which threads are worth it
# Equal classes of birds (40 of CUB's known classes drawn as novel, nine draws) end in linked and refined clusters whose
# sizes vary by 0.20 to 0.29 of their mean, those that fall 20:1 by 0.38 to 0.60.
_EQUAL_SIZES = 0.33
_JUDGING_ROUNDS = 20


def class_whitening(features: Tensor, labels: Tensor, *, shrinkage: float) -> Tensor:
    """Return a transform [d, d] after which the labelled classes vary equally in all directions within themselves.

    It is the inverse square root of the within-class covariance of `features` [N, d], shrunk towards a multiple of the
    identity. Without labelled images, it is the identity.
    """
    if not len(labels):
        return torch.eye(features.shape[1])
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


def balanced_assignment(scores: Tensor, *, temperature: float, sizes: Tensor | None = None) -> Tensor:
    """Turn scores [M, C] into rows that sum to 1, with clusters in proportion to `sizes` [C]; None: equally large.

    This is Sinkhorn's algorithm.
    """
    shares = (scores - scores.amax(dim=1, keepdim=True)).div_(temperature).double().exp_()
    for _ in range(_BALANCING_ROUNDS):
        shares /= shares.sum(dim=0).clamp_min(_EPSILON)
        if sizes is not None:
            shares *= sizes
        shares /= shares.sum(dim=1, keepdim=True).clamp_min(_EPSILON)
    return shares.float()


def refined_assignment(
    directions: Tensor,
    shares: Tensor,
    *,
    temperature: float,
    rounds: int = _ROUNDS,
    equal: bool = True,
    anchors: Tensor | float = 0.0,
) -> Tensor:
    """Run spherical k-means with soft assignments, from a first assignment [M, C] of unit rows.

    Clusters are kept equally large if `equal`; otherwise their sizes follow from the images that are nearest to them.
    `anchors` [C, d] are sums of labelled rows, which always count for the cluster of their class.
    """
    for _ in range(rounds):
        scores = directions @ F.normalize(shares.T @ directions + anchors, dim=1).T
        sizes = None if equal else (scores / temperature).softmax(dim=1).mean(dim=0).clamp_min(_EPSILON)
        shares = balanced_assignment(scores, temperature=temperature, sizes=sizes)
    return shares


def discovered_assignment(
    spaces: list[Tensor], clusters: int, *, equal: bool, temperature: float, starts: int, seed: int
) -> Tensor:
    """Cluster images [M, C] that are given as unit rows in several spaces; the last space joins the others.

    `equal`: the classes are about equally large.
    """
    if not equal:
        return linked_assignment(spaces, clusters, temperature=temperature, starts=starts, seed=seed)
    shares = consensus_assignment(spaces, clusters, temperature=temperature, starts=starts, seed=seed)
    return refined_assignment(spaces[-1], shares, temperature=temperature, rounds=_LAST_ROUNDS)


def equal_by_clusters(spaces: list[Tensor], clusters: int, *, temperature: float, starts: int, seed: int) -> bool:
    """Return True if the classes of images look about equally large: so do linked clusters, refined."""
    shares = linked_assignment(spaces, clusters, temperature=temperature, starts=starts, seed=seed)
    shares = refined_assignment(spaces[-1], shares, temperature=temperature, rounds=_JUDGING_ROUNDS, equal=False)
    return sizes_look_equal(shares.argmax(dim=1), clusters)


def sizes_look_equal(ids: Tensor, clusters: int) -> bool:
    """Return True if the sizes of clusters or classes, by the id of every image, vary as little as equal classes do."""
    sizes = torch.bincount(ids, minlength=clusters).float()
    return bool(sizes.std(correction=0) <= _EQUAL_SIZES * sizes.mean())


def linked_assignment(spaces: list[Tensor], clusters: int, *, temperature: float, starts: int, seed: int) -> Tensor:
    """Link images that many fine clusterings put together, and return clusters of any size as an assignment [M, C].

    Of very many images a sample is linked; the others join the nearest centre.
    """
    together, (least, most) = spaces[-1], _LINKED_IMAGES
    sampled = min(len(together), max(least, min(most, 10 * clusters)))
    rows = torch.randperm(len(together), generator=torch.Generator().manual_seed(seed))[:sampled].sort().values
    ids = _linked_ids([space[rows] for space in spaces], clusters, starts=starts, seed=seed)
    mine = F.one_hot(ids, clusters).float()
    shares = (together @ F.normalize(mine.T @ together[rows], dim=1).T / temperature).softmax(dim=1)
    shares[rows] = mine
    return shares


def _linked_ids(spaces: list[Tensor], clusters: int, *, starts: int, seed: int) -> Tensor:
    """Return clusters [M] of average linkage.

    The distance of two images is the share of clusterings that put them apart, with a part of their mean cosine
    distance, on the same scale: most images are apart in all clusterings, but not equally far.
    """
    fine, images = min(_FINENESS * clusters, len(spaces[0])), len(spaces[0])
    apart, cosine = (np.zeros((images, images), np.float32) for _ in range(2))
    for space in spaces:
        cosine += 1.0 - (space @ space.T).numpy()
        for start in range(starts):
            ids = kmeans_ids(space.numpy(), fine, seed=seed + start, starts=1)
            apart += ids[:, None] != ids[None]
    cosine *= _COSINE_SHARE / max(float(cosine.mean()), _EPSILON)
    apart *= (1.0 - _COSINE_SHARE) / max(float(apart.mean()), _EPSILON)
    distances = apart + cosine
    np.fill_diagonal(distances, 0.0)
    tree = linkage(squareform(distances, checks=False), "average")
    return torch.from_numpy(fcluster(tree, clusters, "maxclust") - 1).long()


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
    ids = torch.from_numpy(kmeans_ids(directions.numpy(), clusters, seed=seed, starts=1))
    first = F.one_hot(ids.long(), clusters).float()
    return refined_assignment(directions, first, temperature=temperature)


def kmeans_ids(rows: NDArray[np.float32], clusters: int, *, seed: int, starts: int = 10) -> NDArray[np.int64]:
    """Return the cluster ids of plain k-means, best of some starts."""
    # With few rows, threads would only wait for each other. Rows that are all alike make fewer clusters, which is fine.
    threads = None if len(rows) * clusters > _PARALLEL_DISTANCES else 1
    with threadpool_limits(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(clusters, n_init=starts, random_state=seed).fit_predict(rows).astype(np.int64)
