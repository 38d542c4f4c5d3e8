from itertools import permutations

import numpy as np
import pytest
from ncd_training.evaluate import cluster_accuracy, cluster_balance, cluster_scores


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
    assert cluster_scores((true + 1) % 3, true) == {"images": 6, "acc": 1.0, "nmi": pytest.approx(1), "ari": 1.0}


def test_balance() -> None:
    assert cluster_balance(np.array([0, 1, 2, 3]), 4) == pytest.approx(1)
    assert cluster_balance(np.array([1, 1, 1]), 4) == 0
    assert cluster_balance(np.array([0, 1]), 4) == pytest.approx(0.5)
