"""PIM (Chiaroni et al., ICCV 2023): a head of parametric information maximisation on features that do not change."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ncd_training.base.matching import matched_clusters
from ncd_training.config.schema import Section
from ncd_training.objective.constrained_kmeans import FREE, centre_heads, class_sums, constrained_kmeans, pile_ids
from ncd_training.objective.losses import mutual_information
from ncd_training.objective.method import Material, Method
from ncd_training.objective.self_labels import branch_features

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel

_SCALE = 25.0  # of the cosines that are logits
_WEIGHT_DECAY = 1e-2
_STRENGTHS = tuple(round(0.05 * number, 2) for number in range(1, 21))


class PimSettings(Section):
    """Settings of the method pim."""

    strengths: tuple[float, ...] = Field(_STRENGTHS, min_length=1)  # lambda: the best one for the known classes is used
    iterations: int = Field(1000, ge=0)
    learning_rate: float = Field(1e-3, gt=0)
    starts: int = Field(100, ge=1)  # of k-means


class Pim(Method):
    """Method that starts heads from semi-supervised k-means, and trains them alone, with all images at once."""

    name = "pim"
    title = "parametric information maximisation (Chiaroni et al., ICCV 2023)"
    needs = MappingProxyType({"branches": "global", "head_form": "cosine"})
    teaches_known = True
    has_epochs = False
    Settings = PimSettings
    strength: Tensor

    def __init__(self, settings: PimSettings) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("strength", torch.tensor(0.0))

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method."""
        return cls(PimSettings.model_validate(config.method.own))

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Find the strength that suits the known classes, then train the cluster head with it."""
        branch, settings, seed = model.branches[0], self.settings, material.config.optim.seed
        (features,), labels = branch_features(model, material)
        rows, head = F.normalize(features, dim=1), branch.linear_cluster_head
        everything = head.out_features + (0 if branch.known_head is None else branch.known)
        self.strength.fill_(chosen_strength(rows, labels, everything, settings, seed=seed))
        ids = pile_ids(branch, features, labels, starts=settings.starts, seed=seed)
        centre_heads(branch, features, labels, ids)
        if branch.known_head is not None:  # known classes have a head of their own
            rows, labels = rows[len(labels) :], labels[:0]
        found = fitted(head.weight.detach().cpu(), rows, labels, settings, strength=float(self.strength))
        with torch.no_grad():
            head.weight.copy_(found)


def chosen_strength(rows: Tensor, labels: Tensor, clusters: int, settings: PimSettings, *, seed: int) -> float:
    """Return the strength with the best clusters of the labelled rows, which come first, if labels are not used."""
    if len(settings.strengths) == 1:
        return settings.strengths[0]
    found = constrained_kmeans(rows, torch.full((len(rows),), FREE), clusters, starts=settings.starts, seed=seed)
    start, true = class_sums(rows, found.ids, clusters), labels.numpy()

    def accuracy(strength: float) -> float:
        weights = fitted(start, rows, labels[:0], settings, strength=strength)
        ids = (rows[: len(labels)] @ F.normalize(weights, dim=1).T).argmax(dim=1).numpy()
        return float(np.mean(matched_clusters(ids, true)[true] == ids))

    return max(settings.strengths, key=accuracy)


def fitted(start: Tensor, rows: Tensor, labels: Tensor, settings: PimSettings, *, strength: float) -> Tensor:
    """Return the weights [C, d] of a head after training on unit rows; the first rows have these labels."""
    weights = F.normalize(start, dim=1).requires_grad_()
    optimizer = torch.optim.Adam([weights], settings.learning_rate, weight_decay=_WEIGHT_DECAY)
    for _ in range(settings.iterations):
        logits = _SCALE * rows @ F.normalize(weights, dim=1).T
        loss = mutual_information(logits, len(labels), strength)
        if len(labels):
            loss = loss + F.cross_entropy(logits[: len(labels)], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights.detach()
