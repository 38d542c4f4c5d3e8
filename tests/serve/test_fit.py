"""The fences around clusters, on numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ncd_serve.fit import FITS, FitLimits, calibrate, log_odds


def at(degrees: list[float]) -> np.ndarray:  # type: ignore[type-arg]
    """Embeddings at angles, of various lengths: only directions count."""
    angles = np.radians(degrees)
    lengths = np.arange(1, len(degrees) + 1)[:, None]
    return (np.stack([np.cos(angles), np.sin(angles)], 1) * lengths).astype(np.float32)


def test_fences_by_hand() -> None:
    angles = [-13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13]
    distances = np.sort(1 - np.cos(np.radians(np.abs(angles))))
    lower, upper = np.quantile(distances, (0.25, 0.75))
    limits = calibrate(at(angles), np.zeros(14, np.int64), np.full(14, 0.8, np.float32), clusters=1)
    np.testing.assert_allclose(limits.centres, [[1, 0]], atol=1e-6)
    assert limits.unusual_distance[0] == pytest.approx(upper + 1.5 * (upper - lower), rel=1e-3)
    assert limits.outlier_distance[0] == pytest.approx(upper + 3.0 * (upper - lower), rel=1e-3)
    assert limits.unusual_odds[0] == pytest.approx(np.log(0.8 / 0.2), rel=1e-5)


def test_judged_by_distance_then_by_confidence() -> None:
    limits = FitLimits(
        np.array([[1, 0], [0, 1]], np.float32),
        np.array([0.1, 0.1], np.float32),
        np.array([0.3, 0.3], np.float32),
        log_odds(np.array([0.5, 0.9], np.float32)),
    )
    embeddings = at([0, 30, 60, 0, 90, 90])  # distances 0, 0.13, 0.5, 0, then 0 to the second centre
    clusters = np.array([0, 0, 0, 0, 1, 1])
    confidences = np.array([0.6, 0.6, 0.99, 0.4, 0.95, 0.6], np.float32)
    fits = limits.judge(embeddings, clusters, confidences)
    assert [FITS[fit] for fit in fits] == ["typical", "unusual", "outlier", "unusual", "typical", "unusual"]


def test_small_clusters_take_the_fences_of_all_and_empty_ones_hold_nobody() -> None:
    rng = np.random.default_rng(0)
    embeddings = at([*rng.normal(0, 5, 40), 90.0, 91.0])
    clusters = np.array([0] * 40 + [1] * 2)
    confidences = np.full(42, 0.9, np.float32)
    limits = calibrate(embeddings, clusters, confidences, clusters=3)
    assert limits.unusual_distance[1] == limits.unusual_distance[2]
    assert limits.judge(embeddings[40:], clusters[40:], confidences[40:]).tolist() == [0, 0]
    assert limits.judge(embeddings[:1], np.array([2]), confidences[:1]).tolist() == [2]
