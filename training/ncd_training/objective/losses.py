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


def self_distillation(student: Tensor, teacher: Tensor, sharpness: float) -> Tensor:
    """Return the cross entropy of logits [B, C] with another view's sharper prediction, which has no gradient."""
    return F.cross_entropy(student, (sharpness * teacher.detach()).softmax(dim=1))


def contrastive(similarity: Tensor, alike: Tensor) -> Tensor:
    """Return the cross entropy of a softmax over all other rows with the shares of those that are `alike`.

    `similarity` [B, B] is divided by the temperature, `alike` [B, B] is at least 0. The diagonals of both do not count,
    nor does a row that is like no other.
    """
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    logs = similarity.masked_fill(itself, -torch.inf).log_softmax(dim=1).masked_fill(itself, 0.0)
    alike = alike.to(logs.dtype).masked_fill(itself, 0.0)
    totals = alike.sum(dim=1)
    rows = -(alike * logs).sum(dim=1) / totals.clamp_min(_EPSILON)
    return rows.sum() / (totals > 0).sum().clamp_min(1)


def mutual_information(logits: Tensor, labelled: int, strength: float) -> Tensor:
    """Return less the entropy of the mean prediction, plus `strength` times the mean entropy of predictions (PIM).

    The first term is over all rows of logits [B, C], the second over those after the first `labelled` ones.
    """
    predictions, logs = logits.softmax(dim=1), logits.log_softmax(dim=1)
    mean = predictions.mean(dim=0)
    unsure = -(predictions[labelled:] * logs[labelled:]).sum(dim=1).mean()
    return strength * unsure + (mean * mean.clamp_min(_EPSILON).log()).sum()


def ramp_up(loss: LossConfig, epoch: int) -> float:
    """Return exp(-5 (1 - t/r)^2), 1 from epoch r on (Eq. 10)."""
    progress = min(epoch, loss.ramp_epochs) / loss.ramp_epochs
    return math.exp(-5.0 * (1.0 - progress) ** 2)
