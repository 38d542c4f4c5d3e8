"""Loss terms of the objective, as pure functions of tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ncd_training.config.schema import LossConfig

_EPSILON = 1e-7


def pairwise_bce(first: Tensor, second: Tensor, positive: Tensor, negative: Tensor | None = None) -> Tensor:
    """Return the binary cross entropy between pseudo labels and predicted agreement of pairs (Eq. 2).

    `first`, `second`: cluster probabilities [M, C] of the two views. `positive`: pseudo labels [M, M].
    `negative`: pseudo labels of another source for the pairs that should differ (single-branch ablation); default
    `positive`.
    """
    agreement = (first @ second.T).clamp(_EPSILON, 1.0 - _EPSILON)
    negative = positive if negative is None else negative
    return -(positive * agreement.log() + (1.0 - negative) * (1.0 - agreement).log()).mean()


def bank_log_probabilities(
    features: Tensor, bank: Tensor, temperature: float, *, positive: Tensor | None = None
) -> Tensor:
    """Return log probabilities over the bank's images: log softmax(z·b / tau), [M, d] and [T, d] to [M, T].

    Both sides are L2-normalised: raw features of 2048 dimensions saturate the softmax at tau = 0.07. `positive` [M, d]
    are features of the other view of the same images, which become column 0 (the released code).
    """
    directions = F.normalize(features, dim=1)
    logits = directions @ F.normalize(bank, dim=1).T
    if positive is not None:
        logits = torch.cat([(directions * F.normalize(positive, dim=1)).sum(dim=1, keepdim=True), logits], dim=1)
    return F.log_softmax(logits / temperature, dim=1)


def symmetric_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return half the sum of both KL divergences, mean over rows: mutual distillation (Eq. 6), gradient into both."""
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(dim=1).mean()


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence, a variant of `symmetric_kl`: mean KL of each side to their mixture."""
    log_mixture = torch.logaddexp(log_p, log_q) - math.log(2.0)
    to_mixture = [(side.exp() * (side - log_mixture)).sum(dim=1) for side in (log_p, log_q)]
    return 0.5 * (to_mixture[0] + to_mixture[1]).mean()


def consistency(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean squared difference of the softmax outputs of two views, over images and classes (Eq. 8)."""
    return F.mse_loss(first, second)


def squared_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the squared distance of the softmax outputs of two views, mean over images: the paper's form of Eq. 8."""
    return (first - second).square().sum(dim=1).mean()


def uniform_divergence(logits: Tensor) -> Tensor:
    """Return the KL divergence of a batch's mean prediction from uniform: 0 if clusters are used equally (ORCA)."""
    mean = logits.softmax(dim=1).mean(dim=0)
    return (mean * mean.clamp_min(_EPSILON).log()).sum() + math.log(logits.shape[1])


def ramp_up(loss: LossConfig, epoch: int) -> float:
    """Return exp(-5 (1 - t/r)^2), 1 from epoch r on (Eq. 10)."""
    progress = min(epoch, loss.ramp_epochs) / loss.ramp_epochs
    return math.exp(-5.0 * (1.0 - progress) ** 2)
