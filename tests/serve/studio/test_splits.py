"""Splits of a cluster, on directions whose groups are known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ncd_serve.studio.splits import propose_splits, silhouette, spherical_kmeans


def on_circle(*degrees: float) -> np.ndarray:
    angles = np.radians(np.array(degrees, np.float32))
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def test_two_groups_are_found_whatever_their_order() -> None:
    ids = spherical_kmeans(on_circle(0, 91, 2, 90, 1, 89, 3), 2)
    assert ids.tolist() in ([0, 1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 1, 0, 1])


def test_silhouette_by_hand() -> None:
    # Two pairs at right angles: inside 0 each, outside 1 each, so (1 - 0) / 1.
    assert silhouette(on_circle(0, 0, 90, 90), np.array([0, 0, 1, 1])) == pytest.approx(1, abs=1e-6)
    # 0° and 60° against 90°: 1 - cos 60° = 0.5 inside; outside 1 and 1 - cos 30° = 0.133975; the third is alone.
    expected = ((1 - 0.5) / 1 + (0.133975 - 0.5) / 0.5 + 0) / 3
    assert silhouette(on_circle(0, 60, 90), np.array([0, 0, 1])) == pytest.approx(expected, abs=1e-5)


def test_the_better_split_comes_first_and_says_so() -> None:
    two, *_ = propose_splits(on_circle(0, 1, 2, 90, 91))
    assert two.groups == [[0, 1, 2], [3, 4]] and two.words == "clearly apart"
    three, *_ = propose_splits(on_circle(0, 1, 2, 80, 81, 160, 161))
    assert sorted(three.groups) == [[0, 1, 2], [3, 4], [5, 6]]
    even = propose_splits(on_circle(*range(0, 40, 2)))
    assert all(split.silhouette > 0 for split in even)
    assert propose_splits(on_circle(5, 5, 5, 5)) == []  # nothing to tell apart
