"""How many novel classes are there? Estimators on features; the true classes of unlabelled images play no part.

All ask with how many clusters classes are found again whose images are known: probe classes, held back from training.

dtc        Han et al. 2019: some probes are anchors that k-means is told, the others must be found; with the silhouette
gcd        Vaze et al. 2022: all known classes must be found in a clustering of everything
balanced   not in a paper, for weaker features: clusters of equal weight, and an unlabelled image in a probe's cluster
           counts as wrong. DTC's accuracy does not see it, and is best with far too few clusters on such features.

All take classes to be about equally large, and the weaker the features, the more the answer rests on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from sklearn.metrics import silhouette_score
from torch import Tensor

from ncd_training.clustering import refined_assignment
from ncd_training.constrained_kmeans import FREE, constrained_kmeans
from ncd_training.evaluate import Ids, cluster_accuracy

if TYPE_CHECKING:
    from ncd_training.config import EstimateConfig
    from ncd_training.progress import Track

_COARSE = 12  # steps that the range is first searched in
_TEMPERATURE = 0.1  # of balanced assignments
_WHAT = "trying numbers of classes"


class Trial(NamedTuple):
    """One number of novel classes, and how well known classes were found with it."""

    classes: int
    accuracy: float
    silhouette: float = math.nan  # of dtc alone


Trials = dict[int, Trial]


@dataclass(frozen=True)
class Estimate:
    """The answer, and what was looked at on the way."""

    estimator: str
    classes: int
    trials: list[Trial]  # fewest classes first
    by_accuracy: int  # the number of classes that the accuracy alone would choose
    by_silhouette: int | None = None

    @property
    def line(self) -> str:
        """For people."""
        return f"about {self.classes} novel classes"

    @property
    def score_name(self) -> str:
        """What `accuracy` is."""
        return "F1 of probe pairs" if self.estimator == "balanced" else "ACC of known classes"

    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        trials = [trial._asdict() for trial in self.trials]
        if self.by_silhouette is None:
            trials = [{"classes": trial.classes, "accuracy": trial.accuracy} for trial in self.trials]
        return {**vars(self), "trials": trials}


def balanced_estimate(
    probe: Tensor, labels: Ids, unlabelled: Tensor, settings: EstimateConfig, *, most: int, seed: int, track: Track
) -> Estimate:
    """From unit rows [P, d] of probe classes, numbered from 0, and [M, d] of unlabelled images."""
    classes = int(labels.max()) + 1
    directions = torch.cat([probe, unlabelled])
    free = torch.full((len(directions),), FREE)

    def score(extra: int, start: int) -> float:
        first = constrained_kmeans(directions, free, classes + extra, starts=1, seed=seed + start).ids
        shares = refined_assignment(directions, F.one_hot(first, classes + extra).float(), temperature=_TEMPERATURE)
        return pair_score(shares.argmax(dim=1).numpy(), labels)

    trials: Trials = {}
    for extra in track(_coarse_to_fine(trials, most, _best_accuracy), _WHAT, _attempts(most)):
        # One start says little, as the best of them would: their mean changes smoothly with the number of clusters.
        trials[extra] = Trial(extra, float(np.mean([score(extra, start) for start in range(settings.starts)])))
    best = _best_accuracy(trials)
    return Estimate("balanced", best, sorted(trials.values()), best)


def pair_score(ids: Ids, labels: Ids) -> float:
    """How well a clustering finds labelled classes among images that belong to none of them: 1 if perfectly.

    F1 of the pairs that hold at least one of the labelled images, which come first in `ids`.
    """
    counts = np.zeros((labels.max() + 1, ids.max() + 1))
    np.add.at(counts, (labels, ids[: len(labels)]), 1)
    together, sizes, mine = _pairs(counts), np.bincount(ids), counts.sum(axis=0)
    called_alike = _pairs(sizes) - _pairs(sizes - mine)
    return float(2 * together / (called_alike + _pairs(counts.sum(axis=1))))


def _pairs(sizes: NDArray[Any]) -> float:
    return float((sizes * (sizes - 1)).sum()) / 2


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
