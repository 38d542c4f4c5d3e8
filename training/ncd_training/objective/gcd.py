"""Generalised category discovery (Vaze et al., CVPR 2022): contrast, then semi-supervised k-means."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import Field
from torch import Tensor

from ncd_training.config.schema import Section
from ncd_training.objective.constrained_kmeans import centre_heads, pile_ids
from ncd_training.objective.contrast import Contrast
from ncd_training.objective.method import Batch, Material, Method
from ncd_training.objective.self_labels import branch_features

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel


class GcdSettings(Section):
    """Settings of the method gcd."""

    supervised_weight: float = Field(0.35, ge=0, le=1)  # of the contrast of known classes; that of views has the rest
    starts: int = Field(10, ge=1)  # of k-means


class Gcd(Method):
    """Method that trains features by contrast alone; the heads are the centres of semi-supervised k-means."""

    name = "gcd"
    title = "generalised category discovery (Vaze et al., CVPR 2022)"
    needs = MappingProxyType({"branches": "global", "head_form": "cosine"})
    teaches_known = True
    Settings = GcdSettings

    def __init__(self, settings: GcdSettings, dim: int) -> None:
        super().__init__()
        self.settings = settings
        self.contrast = Contrast(dim)

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method with a projection for the contrast."""
        return cls(GcdSettings.model_validate(config.method.own), model.dim)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name."""
        views, classes = self.contrast(batch)
        weight = self.settings.supervised_weight
        return {"contrast": (1.0 - weight) * views, "supervised_contrast": weight * classes}

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Set the heads by the features that training starts from."""
        self.after_epoch(model, 0, material)

    def after_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Cluster the features of the tail, and set the heads to the centres."""
        branch, seed = model.branches[0], material.config.optim.seed
        (features,), labels = branch_features(model, material, epoch=epoch)
        ids = pile_ids(branch, features, labels, starts=self.settings.starts, seed=seed)
        centre_heads(branch, features, labels, ids)
