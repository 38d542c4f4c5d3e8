"""SimGCD (Wen, Zhao & Qi, ICCV 2023): a cosine classifier that learns from its own sharper predictions."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ncd_training.config.schema import Section
from ncd_training.model.branches import CosineHead
from ncd_training.objective.contrast import Contrast
from ncd_training.objective.losses import self_distillation, uniform_divergence
from ncd_training.objective.method import Batch, Material, Method

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel


class SimGcdSettings(Section):
    """Settings of the method simgcd."""

    supervised_weight: float = Field(0.35, ge=0, le=1)  # of terms with labels; those without have the rest
    entropy_weight: float = Field(2.0, ge=0)  # epsilon: of the mean prediction's entropy
    first_temperature: float = Field(0.07, gt=0)  # of the teacher; falls to the last one in the epochs of warm-up
    last_temperature: float = Field(0.04, gt=0)
    warm_up_epochs: int = Field(30, ge=1)


class SimGcd(Method):
    """Method with self-distillation between views, entropy of the mean prediction, and contrast of features."""

    name = "simgcd"
    title = "SimGCD (Wen, Zhao and Qi, ICCV 2023)"
    needs = MappingProxyType({"branches": "global", "head_form": "cosine"})
    teaches_known = True
    Settings = SimGcdSettings

    def __init__(self, settings: SimGcdSettings, dim: int, *, open_world: bool) -> None:
        super().__init__()
        self.settings, self.open_world = settings, open_world
        self.sharpness = self._sharpness(0)
        self.contrast = Contrast(dim)

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method with a projection for the contrast."""
        settings = SimGcdSettings.model_validate(config.method.own)
        return cls(settings, model.dim, open_world=config.model.heads == "open_world")

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Set the teacher's temperature."""
        self.sharpness = self._sharpness(epoch)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name."""
        (a,), (b,), n = batch.first, batch.second, len(batch.labels)
        # With separate heads, the cluster head sees unlabelled images alone.
        first = 0 if self.open_world else n
        one, other = a.cluster_logits[first:], b.cluster_logits[first:]
        distilled = self_distillation(one, other, self.sharpness) + self_distillation(other, one, self.sharpness)
        known = torch.cat([a.known_logits[:n], b.known_logits[:n]])
        views, classes = self.contrast(batch)
        taught = self.settings.supervised_weight
        alone = 1.0 - taught
        return {
            "distillation": alone * distilled / 2,
            "balance": alone * self.settings.entropy_weight * uniform_divergence(torch.cat([one, other])),
            "cross_entropy": taught * F.cross_entropy(known, batch.labels.repeat(2)),
            "contrast": alone * views,
            "supervised_contrast": taught * classes,
        }

    def _sharpness(self, epoch: int) -> float:
        """Return the factor of a teacher's logits, which have the student's temperature 1 / 10."""
        start, end = self.settings.first_temperature, self.settings.last_temperature
        progress = min(1.0, epoch / self.settings.warm_up_epochs)
        return 1.0 / (CosineHead.SCALE * (start + progress * (end - start)))
