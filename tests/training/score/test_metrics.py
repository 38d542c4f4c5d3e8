from itertools import permutations

import numpy as np
import pytest
from ncd_training.base.matching import matched_clusters
from ncd_training.score.metrics import (
    class_rows,
    cluster_accuracy,
    cluster_balance,
    cluster_scores,
    joint_scores,
    known_scores,
)


def test_accuracy_is_the_best_of_all_matchings() -> None:
    rng = np.random.default_rng(0)
    predicted, true = rng.integers(0, 4, 50), rng.integers(0, 4, 50)
    best = max(np.mean(np.array(order)[predicted] == true) for order in permutations(range(4)))
    assert cluster_accuracy(predicted, true) == pytest.approx(best)


@pytest.mark.parametrize(("predicted", "expected"), [([2, 2, 0, 0], 1.0), ([0, 1, 2, 3], 0.5), ([5, 5, 5, 5], 0.5)])
def test_accuracy_by_hand_with_any_number_of_clusters(predicted: list[int], expected: float) -> None:
    assert cluster_accuracy(np.array(predicted), np.array([0, 0, 1, 1])) == expected


def test_scores_do_not_depend_on_the_ids() -> None:
    true = np.array([0, 0, 1, 1, 2, 2])
    score = cluster_scores((true + 1) % 3, true)
    assert (score.images, score.acc, score.nmi, score.ari) == (6, 1.0, pytest.approx(1), 1.0)


def test_balance() -> None:
    assert cluster_balance(np.array([0, 1, 2, 3]), 4) == pytest.approx(1)
    assert cluster_balance(np.array([1, 1, 1]), 4) == 0
    assert cluster_balance(np.array([0, 1]), 4) == pytest.approx(0.5)


def test_a_joint_head_is_wrong_when_it_calls_a_novel_image_known() -> None:
    # two known classes; ids 2 and 3 are its novel clusters, matched with the true novel classes 1 and 0
    known = np.array([0, 1, 1, 3]), np.array([0, 1, 0, 1])
    novel = np.array([3, 3, 2, 0]), np.array([0, 0, 1, 1])
    scores = joint_scores(known, novel, classes=2)
    assert {name: score.acc for name, score in scores.items()} == {
        "known-test, joint head": 0.5,
        "novel-test, joint head": 0.75,
        "all-test, joint head": 0.625,
    }


def test_a_joint_head_that_never_says_novel_has_found_nothing() -> None:
    never = joint_scores((np.array([0]), np.array([0])), (np.array([0, 1]), np.array([0, 1])), classes=2)
    assert never["novel-test, joint head"].acc == 0.0


def test_classes_by_hand() -> None:
    true = np.array([0, 0, 0, 1, 1, 3])
    predicted = np.array([2, 2, 5, 5, 5, 2])
    # Class 0 takes cluster 2, class 1 cluster 5; class 3 must take another one, and has nothing in it.
    matched = matched_clusters(predicted, true)
    rows = class_rows(predicted, true, ["wren", "owl"], matched)
    assert [(row.name, row.images, row.share) for row in rows] == [
        ("wren", 3, pytest.approx(2 / 3)),
        ("owl", 2, 1.0),
        ("3", 1, 0.0),
    ]
    assert [row.cluster for row in rows[:2]] == [2, 5]
    assert rows[2].cluster not in (2, 5)
    assert sum(row.images * row.share for row in rows) / 6 == pytest.approx(cluster_accuracy(predicted, true))


def test_known_classes_are_not_matched() -> None:
    scores = known_scores(np.array([0, 1, 1, 7]), np.array([1, 1, 0, 0]), ["gull", "tern"])
    assert (scores.images, scores.acc) == (4, 0.25)
    assert [row.model_dump(by_alias=True, exclude_none=True) for row in scores.classes] == [
        {"class": "gull", "images": 2, "share": 0.0},
        {"class": "tern", "images": 2, "share": 0.5},
    ]
