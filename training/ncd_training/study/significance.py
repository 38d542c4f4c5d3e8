"""Differences between rows of a comparison: paired bootstrap over images and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncd_serve.reference import Reference
from ncd_training.base.run_dir import RunDir

_DRAWS = 1000
_INTERVAL = (2.5, 97.5)  # percentiles


class Graded(NamedTuple):
    """Unlabelled images of a run, and which of them are in the cluster that their class is matched with."""

    images: tuple[str, ...]
    right: NDArray[np.bool_]


class Interval(NamedTuple):
    """Figure in percent or points, with the limits of its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        """True if 0 is not in the interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Resampled:
    """ACC of some rows in every draw of images and seeds, in percent; all rows see the same draws."""

    labels: list[str]
    means: NDArray[np.float64]  # [rows]
    draws: NDArray[np.float64]  # [draws, rows]

    @property
    def best(self) -> str:
        """Row with the highest ACC."""
        return self.labels[int(self.means.argmax())]

    def score(self, label: str) -> Interval:
        """Return the ACC of a row."""
        row = self.labels.index(label)
        return _interval(self.means[row], self.draws[:, row])

    def difference(self, label: str, other: str) -> Interval:
        """Return by how much a row is better than another one."""
        a, b = self.labels.index(label), self.labels.index(other)
        return _interval(self.means[a] - self.means[b], self.draws[:, a] - self.draws[:, b])


def graded(run: RunDir) -> Graded | None:
    """Return which images of a finished run are in the right cluster; None if it has no such record."""
    if not run.reference.exists():
        return None
    reference = Reference.read(run.reference)
    if not reference.truth or not reference.matched:
        return None
    right = np.array(reference.matched)[reference.cluster_ids] == np.array(reference.truth)
    return Graded(tuple(reference.paths), right)


def resample(rows: Mapping[str, Sequence[Graded | None]]) -> Resampled | None:
    """Resample images and seeds of rows, which have a member for each seed; None if fewer than two rows have all.

    Seeds on the same images share the images that are drawn, as one image may be hard with every seed.
    """
    whole = {label: [run for run in runs if run] for label, runs in rows.items() if all(runs)}
    if len(whole) < 2:
        return None
    rng, weights, scores = np.random.default_rng(0), dict[tuple[str, ...], NDArray[np.float64]](), []
    for runs in zip(*whole.values(), strict=True):
        images = runs[0].images
        if any(run.images != images for run in runs):
            return None
        if images not in weights:
            even = np.full(len(images), 1 / len(images))
            weights[images] = rng.multinomial(len(images), even, size=_DRAWS) / len(images)
        scores.append(weights[images] @ np.stack([run.right for run in runs], axis=1))
    stacked = np.stack(scores, axis=1)  # [draws, seeds, rows]
    picked = rng.integers(stacked.shape[1], size=stacked.shape[:2])
    draws = np.take_along_axis(stacked, picked[:, :, None], axis=1).mean(axis=1)
    means = np.array([100.0 * fmean(float(run.right.mean()) for run in runs) for runs in whole.values()])
    return Resampled(list(whole), means, 100 * draws)


def _interval(mean: float, draws: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(draws, _INTERVAL)
    return Interval(float(mean), float(low), float(high))
