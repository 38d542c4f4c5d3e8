import math

import pytest
from ncd_training.config.schema import LossConfig, OptimConfig, PretrainConfig
from ncd_training.objective.losses import ramp_up
from ncd_training.run.pretrain import pretraining_rate
from ncd_training.run.step import learning_rate


@pytest.mark.parametrize(("epoch", "ramp"), [(0, math.exp(-5)), (75, math.exp(-1.25)), (150, 1), (199, 1)])
def test_the_run_warms_up(epoch: int, ramp: float) -> None:
    assert ramp_up(LossConfig(), epoch) == pytest.approx(ramp)


def test_learning_rate_falls_at_each_milestone() -> None:
    optim = OptimConfig(learning_rate=0.03, milestones=(30, 60))
    rates = [learning_rate(optim, epoch) for epoch in (0, 29, 30, 59, 60)]
    assert rates == pytest.approx([0.03, 0.03, 0.003, 0.003, 0.0003])


def test_rotnet_s_rate_falls_to_a_fifth_at_60_120_and_160_of_200() -> None:
    rates = [pretraining_rate(PretrainConfig(), epoch) for epoch in (0, 59, 60, 119, 120, 159, 160, 199)]
    assert rates == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.004, 0.0008, 0.0008])
    short = PretrainConfig(epochs=10)
    assert [pretraining_rate(short, epoch) for epoch in (2, 3)] == pytest.approx([0.1, 0.02])


def test_moco_s_rate_is_half_a_cosine() -> None:
    moco = PretrainConfig(schedule="cosine", learning_rate=0.03, epochs=6)
    rates = [pretraining_rate(moco, epoch) for epoch in (0, 2, 3, 4)]
    assert rates == pytest.approx([0.03, 0.0225, 0.015, 0.0075])
