"""Estimators of the number of novel classes, on features. True classes of unlabelled images are not used.

All of them test how well probe classes, known classes held back from training, are recovered by clustering.

balanced   not in a paper: trees of the probes and of the unlabelled images are cut alike, see objective/class_cuts.py
dtc        Han et al. 2019: some probes are anchors with a fixed cluster in k-means, the others must be recovered;
           together with the silhouette
gcd        Vaze et al. 2022: all known classes must be recovered by a clustering of all images

The weaker the features, the more an estimate depends on classes of about equal size: the cost of joining two clusters
in Ward's tree grows with their sizes. For well separated classes, sizes do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import silhouette_score
from torch import Tensor

from ncd_training.model.predict import Ids
from ncd_training.objective.class_cuts import Cut, count_classes
from ncd_training.objective.constrained_kmeans import FREE, constrained_kmeans
from ncd_training.score.metrics import cluster_accuracy

if TYPE_CHECKING:
    from ncd_serve.progress import Track
    from ncd_training.config.schema import EstimateConfig

_COARSE_STEPS = 12  # of the first search over the range
_PROGRESS_TEXT = "trying numbers of classes"


class Trial(NamedTuple):
    """Number of novel classes that was tried, and the accuracy on known classes with it."""

    classes: int
    accuracy: float
    silhouette: float = math.nan  # only for dtc


Trials = dict[int, Trial]


@dataclass(frozen=True)
class Estimate:
    """Estimated number of novel classes, with the trials or, for `balanced`, the cuts that it is based on."""

    estimator: str
    classes: int
    trials: list[Trial] = field(default_factory=list)  # fewest classes first
    by_accuracy: int | None = None  # number of classes that accuracy alone would select
    by_silhouette: int | None = None
    cuts: list[Cut] = field(default_factory=list)
    interval: tuple[int, int] | None = None  # of both kinds of trees, without the most extreme quarter of the draws

    @property
    def line(self) -> str:
        """Estimate in words."""
        if self.interval is None or self.interval[0] == self.interval[1]:
            return f"about {self.classes} novel classes"
        return f"about {self.classes} novel classes ({self.interval[0]} to {self.interval[1]})"

    def facts(self) -> dict[str, Any]:
        """Return the content of estimate.json."""
        facts: dict[str, Any] = {"estimator": self.estimator, "classes": self.classes}
        if self.cuts:
            cuts = [{**cut._asdict(), "classes": cut.classes} for cut in self.cuts]
            return {**facts, "interval": self.interval, "cuts": cuts}
        trials = [trial._asdict() for trial in self.trials]
        if self.by_silhouette is None:
            trials = [{"classes": trial.classes, "accuracy": trial.accuracy} for trial in self.trials]
        return {**facts, "trials": trials, "by_accuracy": self.by_accuracy, "by_silhouette": self.by_silhouette}


def balanced_estimate(cuts: list[Cut], *, equal: bool = True) -> Estimate:
    """Return the estimate from cuts for several draws of probe classes; `equal`: classes are about equally large."""
    count = count_classes(cuts, equal=equal)
    return Estimate("balanced", count.classes, cuts=cuts, interval=count.interval)


def dtc_estimate(
    probe: Tensor, labels: Ids, unlabelled: Tensor, settings: EstimateConfig, *, most: int, seed: int, track: Track
) -> Estimate:
    """Return DTC's estimate from features [P, d] of probe classes, numbered from 0, and [M, d] of unlabelled images."""
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
    for extra in track(
        _coarse_to_fine(trials, most, _best_accuracy, _best_silhouette), _PROGRESS_TEXT, _attempts(most)
    ):
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
    """Return GCD's estimate from features of all images: Brent's method on the number of clusters."""
    known = int(labels.max()) + 1
    features = torch.cat([labelled, unlabelled])
    free = torch.full((len(features),), FREE)
    trials: Trials = {}
    ticks = iter(track(range(_attempts(most)), _PROGRESS_TEXT, _attempts(most)))

    def loss(extra: float) -> float:
        number = round(extra)
        if number not in trials:
            next(ticks, None)
            ids = constrained_kmeans(features, free, known + number, starts=settings.starts, seed=seed).ids.numpy()
            trials[number] = Trial(number, cluster_accuracy(ids[: len(labels)], labels))
        return -trials[number].accuracy

    minimize_scalar(loss, bounds=(1, most), method="bounded", options={"xatol": 0.5, "maxiter": _attempts(most)})
    list(ticks)  # completes the progress bar
    best = _best_accuracy(trials)
    return Estimate("gcd", best, sorted(trials.values()), best)


def _coarse_to_fine(trials: Trials, most: int, *best: Callable[[Trials], int]) -> Iterator[int]:
    """Yield numbers from 0 to `most` to try next, given the trials so far.

    First a coarse grid, whose step is a power of 2; then the neighbours of the best numbers, with the step halved.
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
    return 1 << max(0, math.floor(math.log2(max(1, most / _COARSE_STEPS))))


def _attempts(most: int) -> int:
    """Return the largest number of trials of a search."""
    step = _first_step(most)
    return most // step + 1 + 4 * int(math.log2(step))


def _best_accuracy(trials: Trials) -> int:
    """Return the largest of the best numbers (DTC's rule)."""
    return max(trials.values(), key=lambda trial: (trial.accuracy, trial.classes)).classes


def _best_silhouette(trials: Trials) -> int:
    return max(trials.values(), key=lambda trial: (trial.silhouette, -trial.classes)).classes


def _silhouette(features: Tensor, rows: Ids, most: int, rng: np.random.Generator) -> Callable[[Ids], float]:
    """Return a function for the silhouette of clusterings, on one sample of rows with precomputed distances."""
    sample = rng.permutation(rows)[:most]
    distances = torch.cdist(features[sample], features[sample]).fill_diagonal_(0).numpy()

    def silhouette(ids: Ids) -> float:
        mine = ids[sample]
        if not 1 < len(np.unique(mine)) < len(mine):
            return -1.0
        return float(silhouette_score(distances, mine, metric="precomputed"))

    return silhouette
