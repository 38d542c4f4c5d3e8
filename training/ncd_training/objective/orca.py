"""ORCA (Cao, Brbic & Leskovec, ICLR 2022): one head for known and novel classes, with an adaptive margin."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ncd_training.config.schema import Section
from ncd_training.model.branches import CosineHead
from ncd_training.objective.losses import uniform_divergence
from ncd_training.objective.method import Batch, Material, Method, mean_over_views

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel

_EPSILON = 1e-7


class OrcaSettings(Section):
    """Settings of the method orca."""

    margin: float = Field(0.5, ge=0)  # upper limit; less as predictions of unlabelled images become more confident


class Orca(Method):
    """Method with an uncertainty-adaptive margin, a positive pair for every image, and balanced use of classes."""

    name = "orca"
    title = "ORCA (Cao, Brbic and Leskovec, ICLR 2022)"
    needs = MappingProxyType({"branches": "global", "heads": "open_world", "head_form": "cosine"})
    teaches_known = True
    Settings = OrcaSettings
    margin: Tensor

    def __init__(self, settings: OrcaSettings) -> None:
        super().__init__()
        self.max_margin = settings.margin
        self.register_buffer("margin", torch.tensor(0.0))

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method."""
        return cls(OrcaSettings.model_validate(config.method.own))

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Set the margin: the less confident predictions of unlabelled images, the slower known classes are learned."""
        branch = model.branches[0]
        (confidence,) = mean_over_views(
            model,
            material,
            material.unlabelled_rows,
            lambda maps: [branch(maps).cluster_logits.softmax(dim=1).amax(dim=1)],
            views=1,
            epoch=epoch,
        )
        self.margin.fill_(min(self.max_margin, 1.0 - float(confidence.mean())))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name."""
        (a,), (b,), labels = batch.first, batch.second, batch.labels
        pairs = positive_pairs(a.embedding.detach(), labels)
        return {
            "cross_entropy": margin_cross_entropy(a.cluster_logits[: len(labels)], labels, self.margin),
            "pairwise": positive_bce(a.cluster_logits.softmax(dim=1), b.cluster_logits.softmax(dim=1)[pairs]),
            "balance": uniform_divergence(a.cluster_logits),
        }


def margin_cross_entropy(logits: Tensor, labels: Tensor, margin: Tensor) -> Tensor:
    """Return the cross entropy with 10 times the margin added to the true class's logit, which weakens its gradient."""
    return F.cross_entropy(logits + CosineHead.SCALE * margin * F.one_hot(labels, logits.shape[1]), labels)


def positive_bce(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean of -log(agreement) of positive pairs: row i of both probabilities [B, C] is a pair."""
    return -(first * second).sum(dim=1).clamp_min(_EPSILON).log().mean()


def positive_pairs(features: Tensor, labels: Tensor) -> Tensor:
    """Return a partner for each image [B]: for a labelled image one of its class, for an unlabelled one the nearest.

    The next image of a class is a random partner, because batches are in random order. An image that is alone in its
    class is its own partner. Nearest is the direction with the highest cosine.
    """
    n = len(labels)
    place = torch.arange(len(features), device=labels.device)
    steps_ahead = (place[:n].unsqueeze(0) - place[:n].unsqueeze(1) - 1) % max(n, 1)
    same_class = torch.where(labels.unsqueeze(0) == labels.unsqueeze(1), steps_ahead, n).argmin(dim=1)
    directions = F.normalize(features, dim=1)
    nearness = directions[n:] @ directions.T
    nearness[place[: len(nearness)], place[n:]] = -torch.inf
    return torch.cat([same_class, nearness.argmax(dim=1)])
