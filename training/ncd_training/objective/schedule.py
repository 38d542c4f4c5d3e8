"""Learning rate and warm-up as functions of the epoch, counted from 0."""

from __future__ import annotations

import math

from ncd_training.config.schema import LossConfig, OptimConfig, PretrainConfig


def learning_rate(optim: OptimConfig, epoch: int) -> float:
    """Return the learning rate, with step decay after each milestone."""
    return optim.learning_rate * optim.decay ** sum(epoch >= milestone for milestone in optim.milestones)


def ramp_up(loss: LossConfig, epoch: int) -> float:
    """Return exp(-5 (1 - t/r)^2), 1 from epoch r on (Eq. 10)."""
    progress = min(epoch, loss.ramp_epochs) / loss.ramp_epochs
    return math.exp(-5.0 * (1.0 - progress) ** 2)


def pretraining_rate(pretrain: PretrainConfig, epoch: int) -> float:
    """Return the learning rate of pretraining: steps at milestones (RotNet), or half a cosine down to 0 (MoCo v2)."""
    done = epoch / pretrain.epochs
    if pretrain.schedule == "cosine":
        return pretrain.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return pretrain.learning_rate * pretrain.decay ** sum(done >= milestone for milestone in pretrain.milestones)
