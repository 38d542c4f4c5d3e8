import itertools

import pytest
import torch
from ncd_training.objective.pseudo_labels import cosine_scores, ranking_scores

FEATURES = torch.tensor([[5.0, 4.0, 3.0, 0.0], [5.0, 4.0, 0.0, 3.0], [0.0, 1.0, 2.0, 9.0]])


def test_soft_scores_are_the_share_of_common_top_indices() -> None:
    # top 2: {0,1}, {0,1}, {2,3}; top 3: {0,1,2}, {0,1,3}, {1,2,3}
    assert ranking_scores(FEATURES, top_k=2).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    third = 2 / 3
    expected = torch.tensor([[1, third, third], [third, 1, third], [third, third, 1]])
    torch.testing.assert_close(ranking_scores(FEATURES, top_k=3), expected)


def test_hard_scores_need_equal_sets() -> None:
    assert ranking_scores(FEATURES, top_k=2, hard=True).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert ranking_scores(FEATURES, top_k=3, hard=True).tolist() == torch.eye(3).tolist()


@pytest.mark.parametrize("top_k", [1, 5, 30])
def test_soft_scores_equal_the_slow_form(top_k: int) -> None:
    features = torch.rand(9, 40, generator=torch.Generator().manual_seed(0))
    scores = ranking_scores(features, top_k=top_k)
    tops = [set(row.topk(top_k).indices.tolist()) for row in features]
    for i, j in itertools.product(range(9), repeat=2):
        assert scores[i, j].item() == pytest.approx(len(tops[i] & tops[j]) / top_k)


def test_more_indices_than_features_means_all_of_them() -> None:
    assert ranking_scores(FEATURES, top_k=30).min() == 1


def test_cosine_scores() -> None:
    features = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
    expected = torch.tensor([[1, 0.6, 0], [0.6, 1, 0.8], [0, 0.8, 1]])
    torch.testing.assert_close(cosine_scores(features), expected)
    assert cosine_scores(features, threshold=0.7).tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_pseudo_labels_carry_no_gradient() -> None:
    features = FEATURES.clone().requires_grad_()
    assert not ranking_scores(features, top_k=2).requires_grad
    assert not cosine_scores(features).requires_grad
