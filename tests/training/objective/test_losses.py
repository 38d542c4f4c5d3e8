"""Numbers worked by hand from the paper's equations."""

import itertools
import math

import pytest
import torch
from ncd_training.objective.losses import (
    bank_log_probabilities,
    consistency,
    jensen_shannon,
    pairwise_bce,
    squared_distance,
    symmetric_kl,
    uniform_divergence,
)

P, Q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])


def test_pairwise_bce_by_hand() -> None:
    first, second = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.8, 0.2], [0.5, 0.5]])
    # agreement 0.8 and 0.5 on the diagonal (same), 0.5 and 0.5 off it (different)
    expected = -(math.log(0.8) + 3 * math.log(0.5)) / 4
    assert pairwise_bce(first, second, torch.eye(2)).item() == pytest.approx(expected)


def test_pairwise_bce_equals_the_sum_over_pairs() -> None:
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.rand(6, 4, generator=rng).softmax(1) for _ in range(2))
    positive, negative = (torch.rand(6, 6, generator=rng) for _ in range(2))
    total = 0.0
    for i, j in itertools.product(range(6), repeat=2):
        q = float(first[i] @ second[j])
        total -= float(positive[i, j]) * math.log(q) + (1 - float(negative[i, j])) * math.log(1 - q)
    assert pairwise_bce(first, second, positive, negative).item() == pytest.approx(total / 36, rel=1e-5)


def test_pairwise_bce_survives_certainty() -> None:
    certain = torch.eye(2, requires_grad=True)
    loss = pairwise_bce(certain, certain, 1 - torch.eye(2))
    loss.backward()
    assert torch.isfinite(loss) and certain.grad is not None and torch.isfinite(certain.grad).all()


def test_bank_distribution_by_hand() -> None:
    # cosines of (3, 4) with (1, 0) and (0, 2) are 0.6 and 0.8; at tau = 0.2 they differ by 1
    logs = bank_log_probabilities(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), 0.2)
    assert logs.exp()[0].tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])


def test_symmetric_kl_by_hand() -> None:
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    backward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert symmetric_kl(P.log(), Q.log()).item() == pytest.approx((forward + backward) / 2)


def test_jensen_shannon_by_hand() -> None:
    to_mixture = [
        0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3),
        0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3),
    ]
    assert jensen_shannon(P.log(), Q.log()).item() == pytest.approx(sum(to_mixture) / 2, rel=1e-5)


@pytest.mark.parametrize("divergence", [symmetric_kl, jensen_shannon])
def test_distillation_moves_both_branches_and_vanishes_when_they_agree(divergence) -> None:  # type: ignore[no-untyped-def]
    sides = [torch.tensor([[0.3, -0.2]], requires_grad=True), torch.tensor([[1.0, -0.5]], requires_grad=True)]
    divergence(*(side.log_softmax(1) for side in sides)).backward()
    assert all(side.grad is not None and side.grad.abs().sum() > 0 for side in sides)
    assert divergence(P.log(), P.log()).item() == pytest.approx(0, abs=1e-7)


def test_consistency_is_the_mean_over_images_and_classes() -> None:
    assert consistency(P, Q).item() == pytest.approx((0.4**2 + 0.4**2) / 2)


def test_bank_distribution_with_the_other_view_in_front() -> None:
    # cosines of (3, 4): 0.8 with the other view (0, 5), 0.6 with the bank's (1, 0)
    logs = bank_log_probabilities(
        torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]), 0.2, positive=torch.tensor([[0.0, 5.0]])
    )
    assert logs.exp()[0].tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e)])


def test_the_paper_s_squared_distance_sums_over_classes() -> None:
    assert squared_distance(P, Q).item() == pytest.approx(0.4**2 + 0.4**2)


def test_uniform_divergence_looks_at_the_batch_mean() -> None:
    confident = torch.tensor([[50.0, 0.0], [0.0, 50.0]])  # two certain answers that use both clusters alike
    assert uniform_divergence(confident).item() == pytest.approx(0, abs=1e-6)
    one_cluster = torch.tensor([[50.0, 0.0], [50.0, 0.0]])
    assert uniform_divergence(one_cluster).item() == pytest.approx(math.log(2), abs=1e-5)
    skewed = torch.tensor([[0.9, 0.1], [0.7, 0.3]]).log()  # mean 0.8, 0.2
    assert uniform_divergence(skewed).item() == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4), rel=1e-5)
