"""Drift of a batch of new images from the images that a model found its clusters in.

Three questions, each answered by a difference that has to be both large and hardly possible by chance: are the
clusters' shares the same, is the model as sure, and do as few images lie beyond the fences of their clusters?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError
from ncd_serve.fit import FITS
from ncd_serve.rows.tables import read_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.prediction import Prediction

    Ids = NDArray[np.integer[Any]]
    Floats = NDArray[np.floating[Any]]

MIN_IMAGES = 20  # for a comparison
_FALSE_ALARM_RATE = 0.001  # of each test, on a batch of the same kind
_LARGE = {"cluster shares": 0.15, "confidence": 0.25, "fit": 0.15}
_DRAWS, _SEED = 2000, 0
_BINS = 10  # of the pictured confidences


@dataclass(frozen=True)
class Measure:
    """Result of one test: the difference of a batch, and the limit above which it counts as drift."""

    name: str
    meaning: str
    difference: float
    limit: float

    @property
    def drifted(self) -> bool:
        """True if the difference is beyond its limit."""
        return self.difference > self.limit


@dataclass(frozen=True)
class ClusterShare:
    """Share of a cluster in the training images and in the batch."""

    cluster_id: int
    name: str
    training: float
    batch: float


@dataclass(frozen=True)
class Drift:
    """Comparison of a batch with the training images."""

    images: int
    unreadable: int
    measures: list[Measure]
    shares: list[ClusterShare]  # of all clusters
    confidences: dict[str, list[float]]  # shares of images by tenths of confidence, then and now
    fits: dict[str, dict[str, float]]  # shares of images by fit, in training and now; empty if the model has no fit

    @property
    def drifted(self) -> bool:
        """True if any measure drifted."""
        return any(measure.drifted for measure in self.measures)


def find_drift(rows: Sequence[Prediction] | str | Path, bundle: Bundle | str | Path) -> Drift:
    """Compare rows with the images of a bundle; raise DataError for too few rows, or rows of another model.

    Rows are predictions or a file of them.
    """
    rows = read_rows(rows) if isinstance(rows, (str, Path)) else rows
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.read(bundle)
    return _compare(rows, bundle)


def _compare(rows: Sequence[Prediction], bundle: Bundle) -> Drift:
    answered = [row for row in rows if row.status != "error"]
    _check(answered, bundle)
    manifest, reference = bundle.manifest, bundle.reference()
    clusters = len(manifest.cluster_names)
    into = np.array([manifest.merged.get(number, number) for number in range(clusters)])
    ids = np.array([row.cluster_id for row in answered])
    counts = np.bincount(into, weights=reference.counts, minlength=clusters)
    batch_counts = np.bincount(ids, minlength=clusters)
    # Where clusters were merged, the model is surer than it was: there nothing can be compared.
    touched = [*manifest.merged, *manifest.merged.values()]
    then = reference.confidences[~np.isin(reference.cluster_ids, touched)]
    now = np.array([row.confidence for row in answered], np.float32)[~np.isin(ids, touched)]
    measures = [_shares_differ(counts, batch_counts), _confidences_differ(then, now)]
    fits: dict[str, dict[str, float]] = {}
    if all(row.fit for row in answered):
        limits = reference.limits()
        own = limits.judge(reference.embeddings, reference.cluster_ids, reference.confidences)
        given = np.array([FITS.index(row.fit) for row in answered if row.fit])
        measures.append(_fits_differ(own, given))
        fits = {"training": _fit_shares(own), "batch": _fit_shares(given)}
    pairs = zip(manifest.cluster_names, _part(counts), _part(batch_counts), strict=True)
    return Drift(
        images=len(answered),
        unreadable=len(rows) - len(answered),
        measures=measures,
        shares=[ClusterShare(number, *pair) for number, pair in enumerate(pairs)],
        confidences={"training": _histogram(then), "batch": _histogram(now)},
        fits=fits,
    )


def _check(answered: Sequence[Prediction], bundle: Bundle) -> None:
    if len(answered) < MIN_IMAGES:
        raise DataError(
            f"{len(answered)} rows of readable images are too few to compare", hint=f"give at least {MIN_IMAGES}"
        )
    clusters = len(bundle.manifest.cluster_names)
    foreign = [row for row in answered if row.cluster_id is None or not 0 <= row.cluster_id < clusters]
    if foreign:
        raise DataError(
            f"cluster {foreign[0].cluster_id} of {foreign[0].path} is not one of the bundle's {clusters}",
            hint="give the --bundle that made these rows",
        )


def _shares_differ(training: Floats | Ids, batch: Ids) -> Measure:
    """Compare shares: half the sum of differences; the limit is its spread in samples of the training shares."""
    images, shares = int(batch.sum()), _part(training)
    # Training images are a sample, too: both stray.
    rng, both = np.random.default_rng(_SEED), 1 / (1 / images + 1 / max(training.sum(), 1))
    strays = np.abs(rng.multinomial(max(1, int(both)), shares, _DRAWS) / max(1, int(both)) - shares).sum(1) / 2
    return Measure(
        "cluster shares",
        "images that would have to change their cluster",
        float(np.abs(_part(batch) - shares).sum() / 2),
        max(_LARGE["cluster shares"], float(np.quantile(strays, 1 - _FALSE_ALARM_RATE))),
    )


def _confidences_differ(training: Floats, batch: Floats) -> Measure:
    """Compare confidences by the Kolmogorov-Smirnov distance, with its limit for large samples."""
    meaning = "largest difference of the shares below any confidence"
    if not (len(training) and len(batch)):
        return Measure("confidence", meaning, 0.0, 1.0)
    values = np.concatenate([training, batch])
    below = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (training, batch)]
    chance = math.sqrt(-math.log(_FALSE_ALARM_RATE / 2) / 2 * (1 / len(training) + 1 / len(batch)))
    return Measure("confidence", meaning, float(np.abs(below[0] - below[1]).max()), max(_LARGE["confidence"], chance))


def _fits_differ(training: Ids, batch: Ids) -> Measure:
    """Compare the shares of images beyond a limit of fit; the limit is the spread in samples of training images."""
    typical = FITS.index("typical")
    expected = float(((training != typical).sum() + 1) / (len(training) + 2))
    strays = np.random.default_rng(_SEED).binomial(len(batch), expected, _DRAWS) / len(batch) - expected
    return Measure(
        "fit",
        "more images that are unusual or outliers",
        float((batch != typical).mean()) - expected,
        max(_LARGE["fit"], float(np.quantile(strays, 1 - _FALSE_ALARM_RATE))),
    )


def _part(counts: Floats | Ids) -> Floats:
    parts: Floats = counts / counts.sum()
    return parts


def _histogram(confidences: Floats) -> list[float]:
    counts, _ = np.histogram(confidences, _BINS, (0.0, 1.0))
    return [float(share) for share in counts / max(1, len(confidences))]


def _fit_shares(fits: Ids) -> dict[str, float]:
    return {name: float((fits == number).mean()) for number, name in enumerate(FITS)}
