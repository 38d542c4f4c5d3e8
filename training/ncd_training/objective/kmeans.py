"""Baseline method: k-means on the features that training would start from."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import Tensor, nn

from ncd_training.model.branches import CosineHead
from ncd_training.model.predict import run_model
from ncd_training.objective.method import Material, Method

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel

STARTS = 20


class KMeansCentres(Method):
    """Method without training: the cluster head predicts the nearest centre of k-means."""

    name = "kmeans"
    title = "k-means on the features that training would start from"
    needs = MappingProxyType({"branches": "global", "heads": "separate"})
    has_epochs = False

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method."""
        return cls()

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Cluster the unlabelled images with the preprocessing of a served model, and set the head to the centres."""
        data = material.config.data
        outputs = run_model(
            model,
            material.unlabelled,
            data.preprocess,
            workers=data.workers,
            track=material.track,
            what="computing features for k-means",
        )
        head = model.branches[0].linear_cluster_head
        set_to_centres(head, torch.from_numpy(outputs.embedding), seed=material.config.optim.seed)


@torch.no_grad()
def set_to_centres(head: nn.Linear, features: Tensor, *, seed: int) -> None:
    """Run k-means on features [M, d] and set the head such that the nearest centre has the highest logit.

    -|z - c|^2 is 2 z.c - |c|^2 up to a term that all clusters share. The unit is the mean squared distance to the
    nearest centre, so that confidence does not depend on the scale of features. For a cosine head, features are
    normalised first.
    """
    directions = isinstance(head, CosineHead)
    if directions:
        features = F.normalize(features, dim=1)
    found = KMeans(head.out_features, n_init=STARTS, random_state=seed).fit(features.numpy())
    centres = torch.from_numpy(found.cluster_centers_).float()
    if directions:
        head.weight.copy_(centres)
        return
    unit = max(found.inertia_ / len(features), torch.finfo(torch.float32).tiny)
    head.weight.copy_(2.0 * centres / unit)
    head.bias.copy_(-centres.square().sum(dim=1) / unit)
