"""Measures of a clustering without true classes, on numbers worked by hand and on clusters that are drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ncd_training.model.predict import Outputs
from ncd_training.score.reference import Labelled
from ncd_training.score.verdict import (
    Separation,
    Weights,
    alike_pairs,
    expected_accuracy,
    judge,
    known_score,
    number_of_classes,
    separation,
)

DIMS = 6


def drawn(classes: int, each: int, *, width: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of classes around corners of their own."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(classes), each)
    corners = np.eye(DIMS)[np.arange(classes) % DIMS] * np.where(np.arange(classes) < DIMS, 1, -1)[:, None]
    return (corners[ids] + width * rng.standard_normal((len(ids), DIMS))).astype(np.float32), ids


def outputs(embedding: np.ndarray, ids: np.ndarray, clusters: int) -> Outputs:
    return Outputs(clusters, embedding, embedding, ids, ids, ids, np.full(len(ids), 0.9, np.float32))


def labelled(classes: int, each: int, *, width: float, seed: int = 0) -> Labelled:
    embedding, ids = drawn(classes, each, width=width, seed=seed)
    return Labelled(embedding, ids, embedding)


def test_silhouettes_by_hand() -> None:
    # Images of cluster 0 are at right angles to each other: a = 1. The second is opposite to cluster 7: b = 2.
    places = np.array([[1, 0], [0, 1], [0, -1], [0, -1]], np.float32)
    found = separation(places, np.array([0, 0, 7, 7]))
    np.testing.assert_allclose(found.silhouettes, [0.0, 0.5, 1.0, 1.0])
    assert found.nearest.tolist() == [7, 7, 0, 0]


def test_an_image_alone_and_a_single_cluster_have_silhouette_0() -> None:
    places = np.array([[1, 0], [0, 1], [0, 1]], np.float32)
    assert separation(places, np.array([0, 1, 1])).silhouettes[0] == 0
    assert not separation(places, np.array([2, 2, 2])).silhouettes.any()


def test_expected_accuracy_by_hand() -> None:
    weights = Weights(0.1, 0.8)
    assert expected_accuracy(0.5, 1.0, weights) == pytest.approx(0.1 + 0.8 * 0.5)
    assert expected_accuracy(0.5, 0.25, weights) == pytest.approx(0.5 / 2)
    assert expected_accuracy(1.0, 1.0, Weights(0.2, 1.0)) == 1.0


def test_pairs_are_alike_if_a_quarter_of_the_images_is_nearer_to_the_other() -> None:
    ids, nearest = np.array([0, 0, 0, 0, 3, 3, 5, 5]), np.array([3, 3, 3, 5, 0, 0, 0, 0])
    nearer = np.array([1, 1, 0, 0, 0, 0, 0, 1], bool)
    apart = Separation(np.where(nearer, -0.1, 0.1), nearest)
    # 0 and 3: (2/4 + 0/2) / 2 = 0.25; 0 and 5: (0/4 + 1/2) / 2 = 0.25.
    assert alike_pairs(ids, apart) == [(0, 3), (0, 5)]
    apart.silhouettes[1] = 0.1
    assert alike_pairs(ids, apart) == [(0, 5)]


def test_held_back_classes_that_stand_apart_are_found() -> None:
    assert known_score(*drawn(6, 20, width=0.05), seed=0) == 1.0
    assert known_score(*drawn(6, 20, width=3.0), seed=0) < 0.7  # type: ignore[operator]
    assert known_score(*drawn(3, 20, width=0.05), seed=0) is None


def test_a_good_clustering_is_judged_better_than_a_bad_one() -> None:
    known = labelled(6, 20, width=0.3, seed=1)
    embedding, ids = drawn(8, 20, width=0.3)
    good = judge(outputs(embedding, ids, 9), known, seed=0)
    bad = judge(outputs(embedding, np.random.default_rng(0).permutation(ids), 9), known, seed=0)
    assert good is not None and bad is not None
    assert good.expected > bad.expected + 0.3 and good.agreement > bad.agreement + 0.3
    assert good.tight == [*range(8)] and len(bad.tight) < 2
    assert (good.images, good.clusters, good.empty) == (160, 8, [8])


def test_a_class_in_two_clusters_is_a_pair_that_looks_like_one() -> None:
    embedding, ids = drawn(4, 40, width=0.3)
    ids[20:40] = 4  # half of class 0
    found = judge(outputs(embedding, ids, 5), labelled(6, 20, width=0.3, seed=1), seed=0)
    assert found is not None and found.alike == [(0, 4)]


def test_a_wrong_number_of_clusters_is_noticed_though_they_stand_apart() -> None:
    known, (embedding, ids) = labelled(12, 20, width=0.1, seed=1), drawn(8, 20, width=0.1)
    # Training has moved the images of a cluster together, whatever they show; the trunk still sees eight classes.
    right, half = outputs(embedding, ids, 8), replace(outputs(drawn(4, 40, width=0.1)[0], ids // 2, 4), trunk=embedding)
    for found, likeness in ((judge(right, known, seed=0), 1.0), (judge(half, known, seed=0), 0.5)):
        assert found is not None and (found.classes, found.likeness) == (8, likeness)
    assert number_of_classes(half, known._replace(share=0.5), known_clusters=0, seed=0) == 8
    assert number_of_classes(half, labelled(3, 20, width=0.1), known_clusters=0, seed=0) is None


def test_a_pile_alone_has_a_verdict() -> None:
    embedding, ids = drawn(8, 20, width=0.1)
    nothing = np.zeros((0, 99), np.float32)  # of no image, the trunk's width is not known
    found = judge(outputs(embedding, ids, 8), Labelled(nothing[:, :DIMS], np.zeros(0, np.int64), nothing), seed=0)
    assert found is not None and found.classes is None and found.expected > 0.7


@pytest.mark.parametrize("ids", [[0, 0, 0], [0, 1, 1], [2, 0, 1]])
def test_few_images_have_a_verdict(ids: list[int]) -> None:
    embedding = np.eye(3, DIMS, dtype=np.float32)
    found = judge(outputs(embedding, np.array(ids), 3), labelled(2, 2, width=0.1), seed=0)
    assert found is not None and found.clusters == len(set(ids)) and found.known_score is None


def test_a_model_that_has_diverged_has_none() -> None:
    embedding, ids = drawn(3, 4, width=0.1)
    embedding[0] = np.nan
    assert judge(outputs(embedding, ids, 3), labelled(3, 4, width=0.1), seed=0) is None
