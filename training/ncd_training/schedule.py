"""Learning rate and warm-up as functions of the epoch, counted from 0."""

from __future__ import annotations

import math

from ncd_training.config import LossConfig, OptimConfig


def learning_rate(optim: OptimConfig, epoch: int) -> float:
    """Step decay: a tenth after each milestone."""
    return optim.learning_rate * 0.1 ** sum(epoch >= milestone for milestone in optim.milestones)


def ramp_up(loss: LossConfig, epoch: int) -> float:
    """exp(-5 (1 - t/r)^2), 1 from epoch r on (Eq. 10)."""
    progress = min(epoch, loss.ramp_epochs) / loss.ramp_epochs
    return math.exp(-5.0 * (1.0 - progress) ** 2)
