import itertools

import pytest
import torch
from ncd_training.config.schema import ModelConfig, PseudoLabelConfig
from ncd_training.objective.pseudo_labels import Calibration, PseudoLabels, cosine_scores, ranking_scores

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


def test_a_calibrated_label_is_the_chance_that_a_pair_with_its_score_is_of_one_class() -> None:
    calibration = Calibration()
    # Pairs of one class: 0.6 and 0.8; of two: 0.1, 0.1, 0.3, 0.3. Deviations from both means are all 0.1.
    scores = torch.tensor([[1.0, 0.6, 0.1, 0.3], [0.6, 1.0, 0.3, 0.1], [0.1, 0.3, 1.0, 0.8], [0.3, 0.1, 0.8, 1.0]])
    calibration.learn(scores, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(calibration.moments, torch.tensor([0.7, 0.2, 0.01]))
    # Log odds grow by 0.5 / 0.01 for each 1 of a score. One of three pairs is of one class: two opposite chances and 0.
    found = calibration(torch.tensor([[1.0, 0.5, 0.4], [0.5, 1.0, 0.0], [0.4, 0.0, 1.0]]), 1 / 3)
    chance = torch.tensor(0.05 * 50).sigmoid()
    expected = torch.tensor([[1.0, chance, 1 - chance], [chance, 1.0, 0.0], [1 - chance, 0.0, 1.0]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_calibration_follows_later_batches_slowly_and_ignores_those_without_pairs() -> None:
    calibration = Calibration()
    calibration.learn(torch.tensor([[1.0, 0.5, 0.1], [0.5, 1.0, 0.1], [0.1, 0.1, 1.0]]), torch.tensor([0, 0, 1]))
    first = calibration.moments.clone()
    calibration.learn(torch.eye(2), torch.tensor([0, 1]))
    assert calibration.moments.equal(first)
    assert first.tolist() == pytest.approx([0.5, 0.1, 0.0])


def test_centred_descriptions_forget_entries_that_every_image_resembles() -> None:
    descriptions = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.8, 0.2, 0.0, 0.0], [0.9, 0.0, 0.0, 0.1]])
    model, labels = ModelConfig(), PseudoLabelConfig(local_top_k=1)
    plain = PseudoLabels("local", 4, model=model, labels=labels)
    assert plain.scores("local", descriptions, share=0.5).min() == 1
    centred = PseudoLabels("local", 4, model=model, labels=labels.model_copy(update={"centred": True}))
    # Means: 0.867, 0.1, 0, 0.033. Most above them: entries 0, 1 and 3.
    assert centred.scores("local", descriptions, share=0.5).tolist() == torch.eye(3).tolist()
