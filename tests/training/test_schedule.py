import math

import pytest
from ncd_training.config import LossConfig, OptimConfig
from ncd_training.schedule import learning_rate, ramp_up


@pytest.mark.parametrize(("epoch", "ramp"), [(0, math.exp(-5)), (75, math.exp(-1.25)), (150, 1), (199, 1)])
def test_the_run_warms_up(epoch: int, ramp: float) -> None:
    assert ramp_up(LossConfig(), epoch) == pytest.approx(ramp)


def test_learning_rate_falls_at_each_milestone() -> None:
    optim = OptimConfig(learning_rate=0.03, milestones=(30, 60))
    rates = [learning_rate(optim, epoch) for epoch in (0, 29, 30, 59, 60)]
    assert rates == pytest.approx([0.03, 0.03, 0.003, 0.003, 0.0003])
