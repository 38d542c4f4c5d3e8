"""Number of classes by cutting trees, on features. Pure functions; not in a paper.

Some known classes play novel ones (probes), the others show how classes vary. A tree of the probes is cut where it has
as many clusters as they have classes, and a tree of the unlabelled images at the same height, for several draws of
probes. Two kinds of trees fail differently: Ward's, which is exact for equal classes but joins small ones, and average
linkage, which is coarser but does not mind sizes. The larger median counts: merging two clusters is easy, splitting is
not. If known classes are of unequal size, so that novel ones must be, too, average linkage alone counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from torch import Tensor

from ncd_serve.progress import Track, silent
from ncd_training.base.randomness import Purpose
from ncd_training.model.predict import Ids
from ncd_training.objective.clustering import class_whitening, main_directions

if TYPE_CHECKING:
    from ncd_training.config.schema import SelfLabelConfig

_MAX_TREE_IMAGES = 5000  # their tree needs 12.5 million distances


class Cut(NamedTuple):
    """Draw of probe classes, and the numbers of clusters of unlabelled images at the cuts of the probes' tree."""

    probes: int
    curve: list[int]  # clusters of unlabelled images where the probes have 2, 3, 4 ... clusters, in Ward's trees
    by_average: int  # clusters where the probes have as many clusters as classes, in trees of average linkage

    @property
    def classes(self) -> int:
        """Clusters at the height where the probes have as many clusters as classes, in Ward's trees."""
        return self.curve[self.probes - 2]


class Count(NamedTuple):
    """Number of classes, and the interval that both kinds of trees span without the most extreme quarter of draws."""

    classes: int
    interval: tuple[int, int]


@dataclass(frozen=True)
class ProbeFeatures:
    """Unit features in the geometry of the classes that are not probes."""

    labelled: Tensor  # of the probes
    labels: Ids  # counted from 0
    unlabelled: Tensor


def count_classes(cuts: list[Cut], *, equal: bool = True) -> Count:
    """Return the larger median of both kinds of trees over draws of probe classes, and their interval.

    Without `equal` classes, only trees of average linkage count.
    """
    found = np.array([[cut.by_average, cut.classes][: 1 + equal] for cut in cuts])
    low, middle, high = np.percentile(found, [12.5, 50, 87.5], axis=0)
    return Count(math.ceil(middle.max()), (math.floor(low.min()), math.ceil(high.max())))


def cut_trees(
    features: Tensor,
    labels: Ids,
    orders: Ids,
    settings: SelfLabelConfig,
    *,
    seed: int,
    at_most: int = _MAX_TREE_IMAGES,
    track: Track = silent,
) -> list[Cut]:
    """Return a cut for each of the `orders` of known classes, the first half of which are probes.

    `features` are of all images, labelled first; trees have `at_most` images.
    """
    cuts = []
    for order in track(orders, "cutting trees", len(orders)):
        seen = probe_features(features, labels, order, len(order) // 2, settings)
        cuts.append(equal_cut(seen.labelled, seen.labels, seen.unlabelled, seed=seed, at_most=at_most))
    return cuts


def equal_cut(probe: Tensor, labels: Ids, unlabelled: Tensor, *, seed: int, at_most: int = _MAX_TREE_IMAGES) -> Cut:
    """Cut the trees of rows [P, d] of probe classes, numbered from 0, and [M, d] of unlabelled images alike."""
    classes = int(labels.max()) + 1
    # Both are subsampled alike: the height of a class in the tree depends on its number of images.
    share = min(1.0, at_most / max(len(probe), len(unlabelled)))
    rng = np.random.default_rng(seed)
    rows = [
        some[rng.permutation(len(some))[: max(2 * classes, math.ceil(share * len(some)))]]
        for some in (probe, unlabelled)
    ]
    mine, theirs = (_join_costs(some, "ward") for some in rows)
    # A cut between the highest join and the next leaves two clusters: their geometric mean.
    middles = np.sqrt(mine[:-1] * mine[1:])[: 2 * classes - 1]
    averages, others = (_join_costs(some, "average") for some in rows)
    height = math.sqrt(averages[classes - 2] * averages[classes - 1])
    return Cut(classes, [1 + int((theirs > middle).sum()) for middle in middles], 1 + int((others > height).sum()))


def class_orders(known: int, *, draws: int, seed: int) -> Ids:
    """Return random orders of the known classes [draws, classes]; the first classes of each are the probes."""
    rng = np.random.default_rng([seed, Purpose.ESTIMATE])
    return np.stack([rng.permutation(known) for _ in range(draws)])


def probe_features(features: Tensor, labels: Ids, order: Ids, probes: int, settings: SelfLabelConfig) -> ProbeFeatures:
    """Return features in the geometry of the classes after the first `probes` in `order`; without probes, of all."""
    numbers = places_in(order, labels)
    taught, used = np.flatnonzero(numbers >= probes), np.flatnonzero(numbers < (probes or len(order)))
    whitening = class_whitening(
        features[taught], torch.from_numpy(numbers[taught] - probes), shrinkage=settings.shrinkage
    )
    seen = torch.cat([features[used], features[len(labels) :]]) @ whitening
    directions = main_directions(F.normalize(seen - seen.mean(dim=0), dim=1), settings.dims)
    return ProbeFeatures(directions[: len(used)], numbers[used], directions[len(used) :])


def places_in(classes: Ids, labels: Ids) -> Ids:
    """Return the position of each label in `classes`."""
    places = np.argsort(classes)
    return places[np.searchsorted(classes, labels, sorter=places)]


def _join_costs(rows: Tensor, kind: str) -> NDArray[np.float64]:
    """Return the costs of the n - 1 joins in a tree of n rows, highest first."""
    return np.sort(linkage(rows.numpy(), kind)[:, 2])[::-1]
