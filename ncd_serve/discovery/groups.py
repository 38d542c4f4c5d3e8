"""Groups of new images that are alike, and that the classes of a model do not explain. Pure functions of arrays.

Components are added to the mixture of all classes, which stays as it is, one by one where they make the batch likelier.
Parts of classes, e.g. one font of a letter, become groups as well. Training images tell them apart: those like a part
of a class are as frequent in training as in the batch, and there are none like a new class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncd_serve.mixture import Mixture, log_student, log_sum, squared_distances

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.integer[Any]]
    Floats = NDArray[np.floating[Any]]

MIN_IMAGES = 8  # of a group
_MAX_GROUPS, _MAX_SEEDS, _ROUNDS = 100, 2000, 40
_OUTLIER_SHARE = 0.1  # images of the batch that are expected to be of no class and no group
_PRIOR_IMAGES = 10.0  # that the spread of a group counts as if it had been seen before
_EXCESS = 3.0  # a new class is that many times as frequent as images like it were in training


class _Component(NamedTuple):
    mean: Floats  # [m]
    share: float  # of the batch
    spread: float


@dataclass(frozen=True)
class Group:
    """Images of a batch that are alike."""

    rows: Ids  # of the batch, the most central first
    mean: Floats  # [m]
    evidence: float  # mean log ratio of the images' density in the group to that in all classes
    claimed: int  # training images that would go to the group
    expected: float  # images of the batch that would be in it, if the batch were like training
    nearest: int  # class whose mean is nearest

    @property
    def purity(self) -> float:
        """Share of the images that training does not explain."""
        return max(0.0, 1 - self.expected / len(self.rows))

    @property
    def strength(self) -> float:
        """Probability that such images are at least three times as frequent as they were in training."""
        spread = math.sqrt(1 / len(self.rows) + 1 / (self.claimed + 0.5))
        return 0.5 * math.erfc((math.log(_EXCESS * self.expected) - math.log(len(self.rows))) / spread / math.sqrt(2))


def find_groups(
    mixture: Mixture, batch: Floats, training: Floats, *, min_images: int = MIN_IMAGES, min_strength: float = 0.0
) -> list[Group]:
    """Return the groups in places [N, m] of a batch beside those of training [R, m], the strongest first."""
    if len(batch) < min_images:
        return []
    components = _add_components(mixture, batch, min_images)
    if not components:
        return []
    left = max(1 - sum(component.share for component in components), 0.05)
    owners = _owners(mixture, components, batch, _background(mixture, batch) + math.log(left))
    claims = _owners(mixture, components, training, _log_density(mixture, training) + math.log(left))
    numbers = [number for number in range(len(components)) if (owners == number).sum() >= min_images]
    groups = [_group(mixture, batch, training, owners == number, claims == number) for number in numbers]
    return sorted((group for group in groups if group.strength >= min_strength), key=lambda group: -group.strength)


def join_groups(groups: list[Group], batch: Floats, training: Floats, classes: Ids) -> list[Group]:
    """Join groups that are as near to each other as two halves of a class of training are, the nearest first."""
    limit = _join_limit(training, classes)
    groups = list(groups)
    while len(groups) > 1:
        spans = np.array([[_span(batch[one.rows], batch[other.rows]) for other in groups] for one in groups])
        spans[np.diag_indices(len(groups))] = np.inf
        one, other = sorted(np.unravel_index(spans.argmin(), spans.shape))
        if spans[one, other] > limit:
            break
        groups[one] = _joined(groups[one], groups.pop(other), batch)
    return groups


def _add_components(mixture: Mixture, batch: Floats, min_images: int) -> list[_Component]:
    """Return components that make the batch likelier, by more than their number of parameters would (BIC)."""
    base, components = _background(mixture, batch), list[_Component]()
    some = batch[:: -(-len(batch) // _MAX_SEEDS)]
    seeds = batch[np.argsort(squared_distances(some, batch), axis=1)[:, :min_images]].mean(1)
    share = min_images / len(batch)
    spread = mixture.spread * (1 + 1 / min_images)
    offers = math.log(share) + log_student(squared_distances(seeds, batch), spread, mixture)
    while len(components) < _MAX_GROUPS:
        gains = np.logaddexp(math.log1p(-share) + base, offers).sum(1)
        found = _fitted(mixture, batch, base, _Component(seeds[gains.argmax()], share, mixture.spread))
        likelier = np.logaddexp(math.log1p(-found.share) + base, _log_component(mixture, batch, found))
        images = found.share * len(batch)
        cost = (mixture.dims + 1) / 2 * math.log(max(images, 2.0))
        if likelier.sum() - base.sum() < cost or images < 0.75 * min_images:
            break
        components.append(found)
        base = likelier
    return components


def _fitted(mixture: Mixture, batch: Floats, base: Floats, start: _Component) -> _Component:
    """Return the component that fits best beside a fixed density, by expectation maximisation."""
    found, dims = start, mixture.dims
    for _ in range(_ROUNDS):
        mine = _log_component(mixture, batch, found)
        part = np.exp(mine - np.logaddexp(mine, math.log1p(-found.share) + base))
        if part.sum() < 1:
            break
        squares = squared_distances(batch, found.mean[None])[:, 0]
        weights = part * (mixture.tail + dims) / (mixture.tail + squares / found.spread)
        spread = (_PRIOR_IMAGES * mixture.spread * dims + weights @ squares) / ((_PRIOR_IMAGES + part.sum()) * dims)
        share = min(float(part.mean()), 1 - 1e-6)
        found = _Component(weights @ batch / weights.sum(), share, float(spread))
    return found


def _log_component(mixture: Mixture, places: Floats, component: _Component) -> Floats:
    squares = squared_distances(places, component.mean[None])[:, 0]
    return math.log(component.share) + log_student(squares, component.spread, mixture)


def _log_density(mixture: Mixture, places: Floats) -> Floats:
    """Return the log density of all classes, each with the same weight: shares of a batch need not be training's."""
    distances = squared_distances(places, mixture.means[mixture.weights >= 1])
    density: Floats = log_sum(log_student(distances, mixture.spread, mixture)) - math.log(distances.shape[1])
    return density


def _background(mixture: Mixture, places: Floats) -> Floats:
    """Return the log density of all classes and of images of no class."""
    seen, unseen = _log_density(mixture, places), mixture.log_unseen(places)
    return np.logaddexp(math.log(1 - _OUTLIER_SHARE) + seen, math.log(_OUTLIER_SHARE) + unseen)


def _owners(mixture: Mixture, components: list[_Component], places: Floats, rest: Floats) -> Ids:
    """Return the number of the component that each image is of; -1 where the rest is likelier."""
    mine = np.stack([_log_component(mixture, places, component) for component in components], 1)
    owners: Ids = np.where(mine.max(1) > rest, mine.argmax(1), -1)
    return owners


def _group(mixture: Mixture, batch: Floats, training: Floats, members: Ids, claims: Ids) -> Group:
    rows = np.flatnonzero(members)
    mean, size = batch[rows].mean(0), len(rows)
    squares = ((batch[rows] - mean) ** 2).sum(1)
    spread = (_PRIOR_IMAGES * mixture.spread + squares.mean() / mixture.dims * size) / (_PRIOR_IMAGES + size)
    ratios = log_student(squares * (size / (size - 1)) ** 2, spread, mixture) - _log_density(mixture, batch[rows])
    nearest_now, nearest_then = (squared_distances(places, mixture.means).argmin(1) for places in (batch, training))
    number = len(mixture.means)
    now, then = (np.bincount(nearest, minlength=number) for nearest in (nearest_now, nearest_then))
    claimed = np.bincount(nearest_then[claims], minlength=number)
    touched = np.unique(nearest_now[rows])
    ratio = now[touched] / np.maximum(then[touched], 1)  # images of the batch for each training image, by class
    return Group(
        rows=rows[np.argsort(squares, kind="stable")],
        mean=mean,
        evidence=float(ratios.mean()),
        claimed=int(claimed[touched].sum()),
        # Half an image more: that none was claimed may be chance.
        expected=float(ratio @ claimed[touched] + 0.5 * np.average(ratio, weights=now[touched])),
        nearest=int(squared_distances(mean[None], mixture.means).argmin()),
    )


def _joined(one: Group, other: Group, batch: Floats) -> Group:
    rows = np.concatenate([one.rows, other.rows])
    mean, weights = batch[rows].mean(0), [len(one.rows), len(other.rows)]
    larger = max(one, other, key=lambda group: len(group.rows))
    return replace(
        larger,
        rows=rows[np.argsort(((batch[rows] - mean) ** 2).sum(1), kind="stable")],
        mean=mean,
        evidence=float(np.average([one.evidence, other.evidence], weights=weights)),
        claimed=one.claimed + other.claimed,
        expected=one.expected + other.expected,
    )


def _span(one: Floats, other: Floats) -> float:
    """Return the mean squared distance between the images of two groups."""
    return float(((one.mean(0) - other.mean(0)) ** 2).sum() + one.var(0).sum() + other.var(0).sum())


def _join_limit(training: Floats, classes: Ids) -> float:
    """Return a span between that of two halves of a class, and that of a class and the one nearest to it."""
    groups = [training[classes == number] for number in np.unique(classes)]
    halves = [_span(*_halves(group)) for group in groups if len(group) >= 4]
    means = np.stack([group.mean(0) for group in groups])
    distances = squared_distances(means, means)
    distances[np.diag_indices(len(means))] = np.inf
    pairs = [_span(groups[number], groups[near]) for number, near in enumerate(distances.argmin(1))]
    return float(np.median(halves) + np.median(pairs)) / 2 if halves and len(groups) > 1 else 0.0


def _halves(group: Floats) -> tuple[Floats, Floats]:
    """Return the images on both sides of the mean, along the direction in which they vary most."""
    centred = group - group.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    first = centred @ axes[0] >= 0
    return group[first], group[~first]
