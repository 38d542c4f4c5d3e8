import numpy as np
from ncd_training.score.reference import class_of_clusters


def test_clusters_get_the_classes_of_the_best_matching() -> None:
    # Greed would give cluster 0 to class 0 for 3 images; the best pairs are class 1 in cluster 0 and class 0 in 2.
    ids = np.array([0, 0, 0, 2, 2, 0, 0, 1])
    truth = [0, 0, 0, 0, 0, 1, 1, 3]
    assert class_of_clusters(ids, truth, {0: "auk", 1: "owl"}, clusters=4) == ["owl", "3", "auk", ""]


def test_a_cluster_that_shares_no_image_with_a_class_has_none() -> None:
    # Two classes and one cluster: the other class is left over, and so are the clusters without images.
    assert class_of_clusters(np.zeros(3, np.int64), [0, 1, 1], {}, clusters=3) == ["1", "", ""]


def test_without_true_classes_nothing_is_matched() -> None:
    assert class_of_clusters(np.zeros(3, np.int64), [], {}, clusters=3) == []
