"""k-means on the features that training would start from: the baseline that everything has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import Tensor, nn

from ncd_training.model.branches import CosineHead
from ncd_training.model.predict import run_model
from ncd_training.objective.method import Material, Method

if TYPE_CHECKING:
    from ncd_training.run.state import TrainState

STARTS = 20


class KMeansCentres(Method):
    """Nothing is trained: the cluster head says which centre is nearest."""

    def before_training(self, state: TrainState, material: Material) -> None:
        """Cluster the unlabelled images as a served model would see them, and set the head to the centres."""
        data = material.config.data
        outputs = run_model(
            state.model,
            material.unlabelled,
            data.preprocess,
            workers=data.workers,
            track=material.track,
            what="features for k-means",
        )
        head = state.model.branches[0].linear_cluster_head
        set_to_centres(head, torch.from_numpy(outputs.embedding), seed=material.config.optim.seed)


@torch.no_grad()
def set_to_centres(head: nn.Linear, features: Tensor, *, seed: int) -> None:
    """k-means on features [M, d], on their directions where the head compares those; nearest centre = highest logit.

    -|z - c|^2 is 2 z.c - |c|^2 but for what all clusters share. It is counted in units of the mean distance to the
    nearest centre, so that confidence does not depend on how long features are.
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
