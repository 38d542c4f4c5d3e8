"""How many novel classes are there? Estimators on features; the true classes of unlabelled images play no part.

All ask how classes are found again whose images are known: probe classes, held back from training.

balanced   not in a paper: Ward's tree of the probes is cut where it has as many clusters as they have classes, and a
           tree of the unlabelled images at the same height; the median over several draws of probes
dtc        Han et al. 2019: some probes are anchors that k-means is told, the others must be found; with the silhouette
gcd        Vaze et al. 2022: all known classes must be found in a clustering of everything

All take classes to be about equally large, and the weaker the features, the more the answer rests on that: what joining
two clusters costs in Ward's tree grows with their images. Where classes lie well apart, their sizes do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.optimize import minimize_scalar
from sklearn.metrics import silhouette_score
from torch import Tensor

from ncd_training.model.predict import Ids
from ncd_training.score.metrics import cluster_accuracy
from ncd_training.study.constrained_kmeans import FREE, constrained_kmeans

if TYPE_CHECKING:
    from ncd_serve.progress import Track
    from ncd_training.config.schema import EstimateConfig

_COARSE = 12  # steps that the range is first searched in
_MOST_IN_TREE = 5000  # images; a tree of them measures 12.5 million distances
_WHAT = "trying numbers of classes"


class Trial(NamedTuple):
    """One number of novel classes, and how well known classes were found with it."""

    classes: int
    accuracy: float
    silhouette: float = math.nan  # of dtc alone


Trials = dict[int, Trial]


class Cut(NamedTuple):
    """One draw of probe classes, and the unlabelled images' clusters when both trees are cut at the same heights."""

    probes: int
    curve: list[int]  # clusters of unlabelled images where the probes have 2, 3, 4 ... clusters

    @property
    def classes(self) -> int:
        """The number of novel classes: at the height where the probes have as many clusters as classes."""
        return self.curve[self.probes - 2]


@dataclass(frozen=True)
class Estimate:
    """The answer, and what was looked at on the way: trials, or for `balanced` cuts."""

    estimator: str
    classes: int
    trials: list[Trial] = field(default_factory=list)  # fewest classes first
    by_accuracy: int | None = None  # the number of classes that the accuracy alone would choose
    by_silhouette: int | None = None
    cuts: list[Cut] = field(default_factory=list)

    @property
    def line(self) -> str:
        """For people."""
        return f"about {self.classes} novel classes"

    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        facts: dict[str, Any] = {"estimator": self.estimator, "classes": self.classes}
        if self.cuts:
            return {**facts, "cuts": [{**cut._asdict(), "classes": cut.classes} for cut in self.cuts]}
        trials = [trial._asdict() for trial in self.trials]
        if self.by_silhouette is None:
            trials = [{"classes": trial.classes, "accuracy": trial.accuracy} for trial in self.trials]
        return {**facts, "trials": trials, "by_accuracy": self.by_accuracy, "by_silhouette": self.by_silhouette}


def balanced_estimate(cuts: list[Cut]) -> Estimate:
    """The median over draws of probe classes."""
    return Estimate("balanced", round(float(np.median([cut.classes for cut in cuts]))), cuts=cuts)


def equal_cut(probe: Tensor, labels: Ids, unlabelled: Tensor, *, seed: int) -> Cut:
    """From rows [P, d] of probe classes, numbered from 0, and [M, d] of unlabelled images."""
    classes = int(labels.max()) + 1
    # Both are thinned alike: how many images a class has decides how high up in the tree it is.
    share = min(1.0, _MOST_IN_TREE / max(len(probe), len(unlabelled)))
    rng = np.random.default_rng(seed)

    def heights(rows: Tensor) -> NDArray[np.float64]:
        """What the joins of Ward's tree cost, dearest first: n rows have n - 1."""
        kept = rng.permutation(len(rows))[: max(2 * classes, math.ceil(share * len(rows)))]
        return np.sort(linkage(rows[kept].numpy(), "ward")[:, 2])[::-1]

    mine, theirs = heights(probe), heights(unlabelled)
    # Two clusters are left by a cut below the dearest join and above the next: half way on the scale of ratios.
    middles = np.sqrt(mine[:-1] * mine[1:])[: 2 * classes - 1]
    return Cut(classes, [1 + int((theirs > middle).sum()) for middle in middles])


def dtc_estimate(
    probe: Tensor, labels: Ids, unlabelled: Tensor, settings: EstimateConfig, *, most: int, seed: int, track: Track
) -> Estimate:
    """DTC's estimate from features [P, d] of probe classes, numbered from 0, and [M, d] of unlabelled images."""
    classes = int(labels.max()) + 1
    anchors = min(classes - 1, max(1, round(settings.anchor_share * classes)))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(classes)[labels]  # anchors are the first ones
    validation = labels >= anchors
    features = torch.cat([probe, unlabelled])
    fixed = torch.full((len(features),), FREE)
    fixed[: len(labels)] = torch.from_numpy(np.where(validation, FREE, labels))
    silhouette = _silhouette(features, np.flatnonzero(fixed.numpy() == FREE), settings.silhouette_images, rng)
    sizes: dict[int, Ids] = {}

    def attempt(extra: int) -> Trial:
        ids = constrained_kmeans(features, fixed, classes + extra, starts=settings.starts, seed=seed).ids.numpy()
        sizes[extra] = np.bincount(ids[len(labels) :])
        found = cluster_accuracy(ids[: len(labels)][validation], labels[validation] - anchors)
        return Trial(extra, found, silhouette(ids))

    trials: Trials = {}
    for extra in track(_coarse_to_fine(trials, most, _best_accuracy, _best_silhouette), _WHAT, _attempts(most)):
        trials[extra] = attempt(extra)
    by_accuracy, by_silhouette = _best_accuracy(trials), _best_silhouette(trials)
    chosen = math.ceil((by_accuracy + by_silhouette) / 2)
    if chosen not in trials:
        trials[chosen] = attempt(chosen)
    counted = int((sizes[chosen] > settings.small_cluster * sizes[chosen].max()).sum())
    return Estimate("dtc", counted, sorted(trials.values()), by_accuracy, by_silhouette)


def gcd_estimate(
    labelled: Tensor, labels: Ids, unlabelled: Tensor, settings: EstimateConfig, *, most: int, seed: int, track: Track
) -> Estimate:
    """GCD's estimate from features of all labelled and unlabelled images: Brent's method on the number of clusters."""
    known = int(labels.max()) + 1
    features = torch.cat([labelled, unlabelled])
    free = torch.full((len(features),), FREE)
    trials: Trials = {}
    ticks = iter(track(range(_attempts(most)), _WHAT, _attempts(most)))

    def loss(extra: float) -> float:
        number = round(extra)
        if number not in trials:
            next(ticks, None)
            ids = constrained_kmeans(features, free, known + number, starts=settings.starts, seed=seed).ids.numpy()
            trials[number] = Trial(number, cluster_accuracy(ids[: len(labels)], labels))
        return -trials[number].accuracy

    minimize_scalar(loss, bounds=(1, most), method="bounded", options={"xatol": 0.5, "maxiter": _attempts(most)})
    list(ticks)  # ends the bar
    best = _best_accuracy(trials)
    return Estimate("gcd", best, sorted(trials.values()), best)


def _coarse_to_fine(trials: Trials, most: int, *best: Callable[[Trials], int]) -> Iterator[int]:
    """Numbers from 0 to `most` that are worth a try, given the trials so far.

    First all in equal steps, a power of 2; then the neighbours of the best ones, in ever halved steps.
    """
    step = _first_step(most)
    yield from range(0, most + 1, step)
    while step > 1:
        step //= 2
        for middle in sorted({choose(trials) for choose in best}):
            for near in (middle - step, middle + step):
                if 0 <= near <= most and near not in trials:
                    yield near


def _first_step(most: int) -> int:
    return 1 << max(0, math.floor(math.log2(max(1, most / _COARSE))))


def _attempts(most: int) -> int:
    """How many trials a search has at most."""
    step = _first_step(most)
    return most // step + 1 + 4 * int(math.log2(step))


def _best_accuracy(trials: Trials) -> int:
    """The largest number among the best: DTC's rule."""
    return max(trials.values(), key=lambda trial: (trial.accuracy, trial.classes)).classes


def _best_silhouette(trials: Trials) -> int:
    return max(trials.values(), key=lambda trial: (trial.silhouette, -trial.classes)).classes


def _silhouette(features: Tensor, rows: Ids, most: int, rng: np.random.Generator) -> Callable[[Ids], float]:
    """Silhouette of any clustering on the same sample of rows, whose distances are measured once."""
    sample = rng.permutation(rows)[:most]
    distances = torch.cdist(features[sample], features[sample]).fill_diagonal_(0).numpy()

    def silhouette(ids: Ids) -> float:
        mine = ids[sample]
        if not 1 < len(np.unique(mine)) < len(mine):
            return -1.0
        return float(silhouette_score(distances, mine, metric="precomputed"))

    return silhouette
