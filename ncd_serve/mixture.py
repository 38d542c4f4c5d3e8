"""Mixture of all classes that a model has seen, known or found, with one component more for those that it has not.

Directions of embeddings are projected into a space in which classes vary equally in all dimensions (whitening by the
covariance within classes). There each class is a Student t around its mean, with one spread and one weight of tails for
all. Unseen classes are together one wide Student t around the mean of all classes: the base of a Dirichlet process. The
odds that an image is in none of the clusters, and that it is of a known class, are calibrated on the model's own
classes, each left out in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import lgamma, log
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.fit import directions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ids = NDArray[np.integer[Any]]
    Floats = NDArray[np.floating[Any]]

OUTSIDE_SHARE = 0.1  # images of no cluster among new ones, or of an unseen class, before an image is looked at
_MAX_DIMS = 128
_LEAST = -1e300  # of logarithms, so that the sum of nothing is minus infinity
_NO_IMAGES = 1e-9  # weight of a class without images, whose logarithm is finite
_SHRINKAGES = (0.1, 0.3, 0.5, 0.8)  # of the covariance within classes, towards a multiple of the identity
_SURELY_OUTSIDE = 0.5
_MOVED_SHARE = 0.001  # of images of old classes that is aimed at, so that fewer than one in 100 go to new ones
_MOST_MOVED_SHARE = 0.002  # that is accepted, so that half of the images of a new class stay with it
_TAILS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # degrees of freedom that are tried
_NEWTON_STEPS = 50
_RIDGE = 1e-6  # keeps a regression on perfectly separated values finite


@dataclass(frozen=True)
class Mixture:
    """T classes in a space of m dimensions: known ones, then clusters. In an open world, all are clusters."""

    projection: Floats  # [d, m]
    offset: Floats  # [m], after the projection: the mean of the classes is at 0
    means: Floats  # [T, m]
    weights: Floats  # [T] images of each class
    known_classes: int  # the first ones
    first_cluster: int  # number of the class that is cluster 0
    tail: float  # degrees of freedom
    spread: float  # variance within a class, in each dimension
    unseen_spread: float  # the same of all unseen classes together
    slope: float = 1.0  # log odds of "in no cluster" are slope * score + intercept
    intercept: float = 0.0
    known_slope: float = 1.0  # the same of "of no known class"
    known_intercept: float = 0.0

    @property
    def dims(self) -> int:
        """Dimensions of the space."""
        return len(self.offset)

    def project(self, embeddings: Floats) -> Floats:
        """Return embeddings [N, d] in the mixture's space [N, m]."""
        places: Floats = directions(embeddings.astype(np.float64)) @ self.projection + self.offset
        return places

    def log_joint(self, places: Floats) -> Floats:
        """Return the log of weight times density of each class for places [N, m], up to a constant: [N, T]."""
        return np.log(self.weights) + log_student(squared_distances(places, self.means), self.spread, self)

    def log_unseen(self, places: Floats) -> Floats:
        """Return the log density of unseen classes, up to the same constant [N]."""
        return log_student((places**2).sum(1), self.unseen_spread, self)

    def outside(self, embeddings: Floats) -> Floats:
        """Return the probability that an image is in no cluster: of a known class, or of an unseen one [N]."""
        return self.outside_at(self.project(embeddings))

    def outside_at(self, places: Floats) -> Floats:
        """Return the same probability for places [N, m]."""
        score = _score(self.log_joint(places), self.log_unseen(places), self.is_cluster)
        return 1 / (1 + np.exp(-self.slope * score - self.intercept))

    def known(self, embeddings: Floats) -> Floats:
        """Return the probability that an image is of a known class, of which there have to be some [N]."""
        places = self.project(embeddings)
        score = _score(self.log_joint(places), self.log_unseen(places), self.is_known)
        return 1 / (1 + np.exp(self.known_slope * score + self.known_intercept))

    @property
    def is_cluster(self) -> NDArray[np.bool_]:
        """Mask of the classes that are clusters [T]."""
        return np.arange(len(self.means)) >= self.first_cluster

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """Mask of the known classes [T]."""
        return np.arange(len(self.means)) < self.known_classes


def fit_mixture(
    embeddings: Floats, classes: Ids, *, number: int, known: int, open_world_share: float | None = None
) -> Mixture:
    """Return the mixture of `number` classes, the first `known` of them known, from embeddings [N, d] of their images.

    In an open world, known classes are clusters, and have a share of the new images.
    """
    vectors = directions(embeddings.astype(np.float64))
    raw, places, own = _fitted(vectors, classes, number, known, _best_shrinkage(vectors, classes, number))
    raw = raw if open_world_share is None else replace(raw, first_cluster=0)
    calibrate = partial(_calibrate, raw, places, classes, own)
    slope, intercept = calibrate(raw.is_cluster, share=1 - OUTSIDE_SHARE, unseen=float(raw.is_cluster.mean()))
    raw = replace(raw, slope=slope, intercept=intercept)
    if not known:
        return raw
    share = min(max(open_world_share or 0, OUTSIDE_SHARE), 1 - OUTSIDE_SHARE)
    slope, intercept = calibrate(raw.is_known, share=share, unseen=OUTSIDE_SHARE)
    return replace(raw, known_slope=slope, known_intercept=intercept)


def grow(mixture: Mixture, groups: Sequence[Floats], others: Floats, training: tuple[Floats, Ids]) -> Mixture:
    """Return the mixture with a class more for each group of places [n, m].

    Fewer than one in a hundred images of old classes are to go to new ones. So new classes need a lead over old ones:
    more than the other places of the batch [N, m] have, by as much as it takes to make such leads rarer among classes
    of training that are played as new. Half of the images that a class was found in stay with it, unless its lead were
    too frequent among the played classes then. `training` are the places of all old classes [R, m], and their classes
    [R].
    """
    means = np.stack([places.mean(0) for places in groups])
    weights = np.array([len(places) for places in groups], np.float64)
    grown = replace(
        mixture, means=np.concatenate([mixture.means, means]), weights=np.concatenate([mixture.weights, weights])
    )
    share, played = _MOVED_SHARE / len(groups), _leads(mixture, *training)
    needed = np.full(len(groups), max(_rarer_than(played, share), 0.0))
    others = others[mixture.outside_at(others) < _SURELY_OUTSIDE]  # those above may be of the new classes, too
    if len(others):
        joint = grown.log_joint(others)
        leads = np.sort(joint[:, len(mixture.means) :] - joint[:, : len(mixture.means)].max(1, keepdims=True), axis=0)
        allowed = int(share * len(others))
        seen = (allowed + 1) / (len(others) + 1)  # as rare as the lead that is taken from the batch
        rarer = max(_rarer_than(played, share) - _rarer_than(played, seen), 0.0)
        needed = np.maximum(needed, leads[-1 - allowed] + rarer)
    middle = [_middle_lead(grown, places, len(mixture.means) + n) for n, places in enumerate(groups)]
    least = max(_rarer_than(played, _MOST_MOVED_SHARE / len(groups)), 0.0)
    needed = np.maximum(np.minimum(needed, middle), least)
    weights = np.maximum(weights * np.exp(-needed), _NO_IMAGES)
    return replace(grown, weights=np.concatenate([mixture.weights, weights]))


def _middle_lead(grown: Mixture, places: Floats, number: int) -> float:
    """Return the median lead of a class over all others for its own places."""
    joint = grown.log_joint(places)
    return float(np.median(joint[:, number] - np.delete(joint, number, axis=1).max(1)))


def _leads(mixture: Mixture, places: Floats, classes: Ids) -> Floats:
    """Return the leads that each class has over all others for images that are not its own, from small to large."""
    joint, rows = mixture.log_joint(places), np.arange(len(places))
    sizes = np.bincount(classes, minlength=len(mixture.means))
    squares = _without_itself(((places - mixture.means[classes]) ** 2).sum(1), sizes[classes])
    joint[rows, classes] = np.log(mixture.weights[classes]) + log_student(squares, mixture.spread, mixture)
    ordered = np.sort(joint, axis=1)[:, -2:]
    leads = joint - np.where(joint == ordered[:, -1:], ordered[:, :1], ordered[:, -1:])
    leads[rows, classes] = np.nan
    played = leads[:, sizes > 0]
    found: Floats = np.sort(played[np.isfinite(played)])
    return found


def _rarer_than(leads: Floats, share: float) -> float:
    """Return the lead that this share of sorted leads exceeds; 0 where there are none."""
    return float(leads[-1 - int(share * len(leads))]) if len(leads) else 0.0


def relabel(mixture: Mixture, places: Floats, before: Ids, after: Ids, *, sizes: Ids) -> Mixture:
    """Return the mixture after places [n, m] went from classes `before` to classes `after` [n]; -1 is no class.

    `sizes` [T] are the numbers of images that the means are of.
    """
    shifts, sizes = np.zeros_like(mixture.means), sizes.astype(np.float64)
    now = sizes.copy()
    for classes, sign in ((before, -1), (after, 1)):
        rows = np.flatnonzero(classes >= 0)
        np.add.at(shifts, classes[rows], sign * (places[rows] - mixture.means[classes[rows]]))
        np.add.at(now, classes[rows], sign)
    weights = np.maximum(np.where(sizes > 0, mixture.weights / np.maximum(sizes, 1), 1.0) * now, _NO_IMAGES)
    return replace(mixture, means=mixture.means + shifts / np.maximum(now, 1)[:, None], weights=weights)


def _fitted(vectors: Floats, classes: Ids, number: int, known: int, shrinkage: float) -> tuple[Mixture, Floats, Floats]:
    """Return the mixture before calibration, places, and squared distances to the mean of others of the class."""
    sizes = np.bincount(classes, minlength=number)
    projection = _whitening(vectors, classes, number, shrinkage)
    places = vectors @ projection
    means = _means(places, classes, number)
    offset = -means[sizes > 0].mean(0)
    places, means = places + offset, np.where(sizes[:, None] > 0, means + offset, 0.0)
    own = _without_itself(((places - means[classes]) ** 2).sum(1), sizes[classes])
    tail, spread = _student(own, len(offset))
    unseen_spread = spread + float((means**2).sum() / max((sizes > 0).sum(), 1)) / len(offset)
    weights = np.maximum(sizes, _NO_IMAGES)
    raw = Mixture(projection, offset, means, weights, known, known, tail, spread, unseen_spread)
    return raw, places, own


def _best_shrinkage(vectors: Floats, classes: Ids, number: int) -> float:
    """Return the shrinkage by which a mixture of one half of the images finds the classes of the other half best."""
    half = np.zeros(len(classes), bool)
    for each in range(number):
        half[np.flatnonzero(classes == each)[::2]] = True
    if half.all():
        return _SHRINKAGES[-1]
    scores = []
    for shrinkage in _SHRINKAGES:
        mixture, _, _ = _fitted(vectors[half], classes[half], number, 0, shrinkage)
        joint = mixture.log_joint(vectors[~half] @ mixture.projection + mixture.offset)
        rows = np.arange(len(joint))
        scores.append(float((joint[rows, classes[~half]] - log_sum(joint)).mean()))
    return _SHRINKAGES[int(np.argmax(scores))]


def log_student(squares: Floats, spread: float, mixture: Mixture) -> Floats:
    """Return the log density of a Student t at squared distances from its mean, up to a constant of tail and dims."""
    return _log_student(squares, spread, mixture.tail, mixture.dims)


def _log_student(squares: Floats, spread: float, tail: float, dims: int) -> Floats:
    density: Floats = -dims / 2 * np.log(spread) - (tail + dims) / 2 * np.log1p(squares / (tail * spread))
    return density


def _whitening(vectors: Floats, classes: Ids, number: int, shrinkage: float) -> Floats:
    """Return the projection [d, m] onto the main directions, after the variation within classes is made equal."""
    rest = vectors - _means(vectors, classes, number)[classes]
    within = rest.T @ rest / len(rest)
    within = (1 - shrinkage) * within + shrinkage * np.trace(within) / len(within) * np.eye(len(within))
    values, axes = np.linalg.eigh(within)
    white = axes / np.sqrt(np.maximum(values, 1e-12))
    moved = vectors @ white
    moved -= moved.mean(0)
    _, main = np.linalg.eigh(moved.T @ moved)
    projection: Floats = white @ main[:, ::-1][:, :_MAX_DIMS]
    return projection


def _means(vectors: Floats, classes: Ids, number: int) -> Floats:
    sums = np.zeros((number, vectors.shape[1]))
    np.add.at(sums, classes, vectors)
    means: Floats = sums / np.maximum(np.bincount(classes, minlength=number), 1)[:, None]
    return means


def _without_itself(squares: Floats, sizes: Ids) -> Floats:
    """Return squared distances of images to the mean of the other images of their class."""
    corrected: Floats = squares * (sizes / np.maximum(sizes - 1, 1)) ** 2
    return corrected


def _student(squares: Floats, dims: int) -> tuple[float, float]:
    """Return tail and spread of the likeliest Student t for squared distances from the mean."""
    found = []
    for tail in _TAILS:
        spread = float(squares.mean()) / dims
        for _ in range(_NEWTON_STEPS):
            spread = float(((tail + dims) * squares / (tail + squares / spread)).mean()) / dims
        constant = lgamma((tail + dims) / 2) - lgamma(tail / 2) - dims / 2 * log(tail)
        found.append((constant + float(_log_student(squares, spread, tail, dims).mean()), tail, spread))
    return max(found)[1:]


def _score(joint: Floats, unseen: Floats, inside: NDArray[np.bool_]) -> Floats:
    """Return the log ratio of everything else to the classes inside [T], before calibration [N]."""
    others = np.concatenate([joint[:, ~inside], unseen[:, None]], 1)
    return log_sum(others) - log_sum(joint[:, inside])


def _calibrate(
    raw: Mixture,
    places: Floats,
    classes: Ids,
    own: Floats,
    inside: NDArray[np.bool_],
    *,
    share: float,
    unseen: float,
) -> tuple[float, float]:
    """Return slope and intercept of the log odds that an image is of none of the classes inside [T].

    Outside are images of the other classes, and those of classes inside that are left out, which make a share `unseen`
    of them. Every class counts the same; `share` of new images are expected inside.
    """
    joint, rows, chosen = raw.log_joint(places), np.arange(len(places)), inside[classes]
    joint[rows, classes] = np.log(raw.weights[classes]) + log_student(own, raw.spread, raw)
    scores = _score(joint, raw.log_unseen(places), inside)
    joint[rows[chosen], classes[chosen]] = -np.inf
    left_out = _score(joint[chosen], raw.log_unseen(places[chosen]), inside)
    usable = np.isfinite(left_out)  # without other classes inside there is nothing to compare with
    each = 1 / raw.weights[classes]
    outer = np.concatenate([(1 - unseen) * _to_one(each * ~chosen), unseen * _to_one(each[chosen] * usable)])
    return _logistic(
        np.concatenate([scores, scores, np.where(usable, left_out, 0.0)]),
        np.concatenate([np.zeros(len(rows)), np.ones(len(outer))]),
        np.concatenate([share * _to_one(each * chosen), (1 - share) * _to_one(outer)]),
    )


def _to_one(weights: Floats) -> Floats:
    """Return weights that sum to 1, or 0 where there are none."""
    scaled: Floats = weights / max(float(weights.sum()), 1e-300)
    return scaled


def _logistic(values: Floats, answers: Floats, weights: Floats) -> tuple[float, float]:
    """Return slope and intercept of the logistic regression of answers (0 or 1) on values, by Newton's method."""
    middle, scale = np.average(values, weights=weights), max(float(values.std()), 1e-12)
    design = np.stack([(values - middle) / scale, np.ones_like(values)], 1)
    found = np.zeros(2)
    for _ in range(_NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-design @ found))
        slope = design.T @ (weights * (answers - chance)) - _RIDGE * found
        bend = (design * (weights * chance * (1 - chance))[:, None]).T @ design + _RIDGE * np.eye(2)
        found += np.linalg.solve(bend, slope)
    return float(found[0] / scale), float(found[1] - found[0] * middle / scale)


def squared_distances(places: Floats, means: Floats) -> Floats:
    """Return squared distances [N, T] of places [N, m] to means [T, m]."""
    squares: Floats = (places**2).sum(1)[:, None] - 2 * places @ means.T + (means**2).sum(1)
    return np.maximum(squares, 0)


def log_sum(values: Floats) -> Floats:
    """Return the log of the sum of exponentials over the last axis."""
    most = np.maximum(values.max(-1, keepdims=True), _LEAST)
    with np.errstate(divide="ignore"):
        total: Floats = most[..., 0] + np.log(np.exp(values - most).sum(-1))
    return total
