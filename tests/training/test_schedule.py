import math

import pytest
from ncd_training.config import LossConfig, OptimConfig
from ncd_training.schedule import consistency_weight, learning_rate


@pytest.mark.parametrize(
    ("epoch", "weight"), [(0, 50 * math.exp(-5)), (75, 50 * math.exp(-1.25)), (150, 50), (199, 50)]
)
def test_consistency_ramps_up(epoch: int, weight: float) -> None:
    assert consistency_weight(LossConfig(), epoch) == pytest.approx(weight)


def test_learning_rate_falls_at_each_milestone() -> None:
    optim = OptimConfig(learning_rate=0.03, milestones=(30, 60))
    rates = [learning_rate(optim, epoch) for epoch in (0, 29, 30, 59, 60)]
    assert rates == pytest.approx([0.03, 0.03, 0.003, 0.003, 0.0003])
