"""ORCA (Cao, Brbic & Leskovec, ICLR 2022): one head for known and novel classes, and patience with novel ones."""

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

    margin: float = Field(0.5, ge=0)  # upper limit; less as the model gets surer of the unlabelled images


class Orca(Method):
    """Cross entropy with an uncertainty-adaptive margin, a positive pair for every image, and even use of classes."""

    name = "orca"
    title = "ORCA (Cao, Brbic and Leskovec, ICLR 2022)"
    needs = MappingProxyType({"branches": "global", "heads": "open_world", "head_form": "cosine"})
    teaches_known = True
    Settings = OrcaSettings
    margin: Tensor

    def __init__(self, settings: OrcaSettings) -> None:
        super().__init__()
        self.most = settings.margin
        self.register_buffer("margin", torch.tensor(0.0))

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method."""
        return cls(OrcaSettings.model_validate(config.method.own))

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Set the margin: the less certain the unlabelled images are, the more the known classes are held back."""
        branch = model.branches[0]
        (confidence,) = mean_over_views(
            model,
            material,
            material.unlabelled_rows,
            lambda maps: [branch(maps).cluster_logits.softmax(dim=1).amax(dim=1)],
            views=1,
            epoch=epoch,
        )
        self.margin.fill_(min(self.most, 1.0 - float(confidence.mean())))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The terms by name."""
        (a,), (b,), labels = batch.first, batch.second, batch.labels
        pairs = positive_pairs(a.embedding.detach(), labels)
        return {
            "cross_entropy": margin_cross_entropy(a.cluster_logits[: len(labels)], labels, self.margin),
            "pairwise": positive_bce(a.cluster_logits.softmax(dim=1), b.cluster_logits.softmax(dim=1)[pairs]),
            "balance": uniform_divergence(a.cluster_logits),
        }


def margin_cross_entropy(logits: Tensor, labels: Tensor, margin: Tensor) -> Tensor:
    """Cross entropy after the true class's logit (10 cos) is raised by 10 times the margin: it is learned less hard."""
    return F.cross_entropy(logits + CosineHead.SCALE * margin * F.one_hot(labels, logits.shape[1]), labels)


def positive_bce(first: Tensor, second: Tensor) -> Tensor:
    """-log of how much two images that belong together agree: probabilities [B, C] each, row by row."""
    return -(first * second).sum(dim=1).clamp_min(_EPSILON).log().mean()


def positive_pairs(features: Tensor, labels: Tensor) -> Tensor:
    """A partner for each image [B]: a labelled one's is of its class, an unlabelled one's is the nearest direction.

    Batches are in random order, so the next image of a class is a random one; one that is alone is its own partner.
    """
    n = len(labels)
    place = torch.arange(len(features), device=labels.device)
    steps_ahead = (place[:n].unsqueeze(0) - place[:n].unsqueeze(1) - 1) % max(n, 1)
    same_class = torch.where(labels.unsqueeze(0) == labels.unsqueeze(1), steps_ahead, n).argmin(dim=1)
    directions = F.normalize(features, dim=1)
    nearness = directions[n:] @ directions.T
    nearness[place[: len(nearness)], place[n:]] = -torch.inf
    return torch.cat([same_class, nearness.argmax(dim=1)])
