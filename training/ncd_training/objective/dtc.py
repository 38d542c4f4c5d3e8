"""Deep transfer clustering (Han, Vedaldi & Zisserman, ICCV 2019): a model learns its own predictions, sharpened.

The cluster head holds centres in a small space (`branches.CentreHead`). Targets are the head's own predictions, squared
and balanced over the clusters. Variants differ in the consistency that they ask of two views of an image.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import Tensor

from ncd_training.config.schema import LossConfig, Section
from ncd_training.model.branches import CentreHead
from ncd_training.objective.kmeans import STARTS
from ncd_training.objective.losses import consistency, ramp_up
from ncd_training.objective.method import Batch, Material, Method, mean_over_views

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import Branch, DualBranchModel, Modules

_VIEWS = 1  # of each image, for new targets


class DtcSettings(Section):
    """Settings of the method dtc."""

    # pi: two views of an image agree; te: a view agrees with the mean of earlier epochs; tep: as te, and the targets
    # are made from this mean.
    variant: Literal["baseline", "pi", "te", "tep"] = "pi"
    warm_up_epochs: int = Field(10, ge=0)  # epochs with the targets of the first clustering
    refresh_epochs: int = Field(5, ge=1)
    memory: float = Field(0.6, ge=0, lt=1)  # alpha of te and tep: weight of earlier epochs in the mean


class DeepTransferClustering(Method):
    """Method with the KL divergence to sharpened targets; `pi`, `te` and `tep` add consistency between views."""

    name = "dtc"
    title = "deep transfer clustering (Han, Vedaldi and Zisserman, ICCV 2019)"
    needs = MappingProxyType({"branches": "global", "heads": "separate", "head_form": "centres"})
    Settings = DtcSettings
    targets: Tensor
    ensemble: Tensor
    seen: Tensor

    def __init__(self, settings: DtcSettings, loss: LossConfig, *, images: int, clusters: int) -> None:
        super().__init__()
        self.settings, self.loss, self.ramp = settings, loss, 0.0
        self.register_buffer("targets", torch.zeros(images, clusters))  # p
        self.register_buffer("ensemble", torch.zeros(images, clusters))  # running mean of q, not yet bias-corrected
        self.register_buffer("seen", torch.zeros(images))  # number of predictions of an image in `ensemble`

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method with targets for these numbers of images and clusters."""
        return cls(DtcSettings.model_validate(config.method.own), config.loss, images=images, clusters=clusters)

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Find centres by k-means after PCA, and targets from the distances to them."""
        branch, rows = model.branches[0], material.unlabelled_rows
        (features,) = mean_over_views(model, material, rows, lambda maps: [branch(maps).embedding], views=_VIEWS)
        start_head(_head(model), features, seed=material.config.optim.seed)
        self._make_targets(_head(model)(features.to(self.targets.device)).softmax(dim=1))

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Refresh the targets every few epochs after the warm-up."""
        since = epoch - self.settings.warm_up_epochs
        self.ramp = ramp_up(self.loss, since) if since >= 0 else 0.0
        if since < 0 or since % self.settings.refresh_epochs:
            return
        if self.settings.variant == "tep" and self.seen.all():
            self._make_targets(self._mean_so_far())
            return
        branch, rows = model.branches[0], material.unlabelled_rows
        (q,) = mean_over_views(
            model,
            material,
            rows,
            lambda maps: [branch(maps).cluster_logits.softmax(dim=1)],
            views=_VIEWS,
            epoch=epoch,
        )
        self._make_targets(q.to(self.targets.device))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name."""
        n, rows, variant = len(batch.labels), batch.rows, self.settings.variant
        logits = batch.first[0].cluster_logits[n:]
        terms = {"clustering": F.kl_div(logits.log_softmax(dim=1), self.targets[rows], reduction="batchmean")}
        if variant != "baseline":
            q = logits.softmax(dim=1)
            other = batch.second[0].cluster_logits[n:].softmax(dim=1) if variant == "pi" else self._mean_so_far(rows, q)
            terms["consistency"] = self.loss.consistency_weight * self.ramp * consistency(q, other)
        return terms

    @torch.no_grad()
    def remember(self, batch: Batch, *, branches: Modules[Branch], generator: torch.Generator) -> None:
        """Add this step's predictions to the mean over epochs."""
        q, alpha = batch.first[0].cluster_logits[len(batch.labels) :].softmax(dim=1), self.settings.memory
        rows = batch.rows
        self.ensemble[rows] = alpha * self.ensemble[rows] + (1.0 - alpha) * q
        self.seen[rows] += 1.0

    def _mean_so_far(self, rows: Tensor | slice = slice(None), unseen: Tensor | None = None) -> Tensor:
        """Return the bias-corrected mean over epochs; `unseen` for an image without predictions."""
        seen = self.seen[rows].unsqueeze(1)
        mean = self.ensemble[rows] / (1.0 - self.settings.memory**seen).clamp_min(torch.finfo(torch.float32).tiny)
        return mean if unseen is None else torch.where(seen > 0, mean, unseen.detach())

    @torch.no_grad()
    def _make_targets(self, q: Tensor) -> None:
        self.targets.copy_(sharpened(q))


def sharpened(q: Tensor) -> Tensor:
    """Return p_ik in proportion to q_ik^2 / sum_i q_ik: more confident than q, and balanced over the clusters."""
    p = q.square() / q.sum(dim=0)
    return p / p.sum(dim=1, keepdim=True)


@torch.no_grad()
def start_head(head: CentreHead, features: Tensor, *, seed: int) -> None:
    """Set the projection to the first principal components of features [M, d], and the centres by k-means.

    There are as many components as clusters. With fewer images or features, the missing components are 0.
    """
    clusters = len(head.centres)
    found = PCA(min(clusters, *features.shape), random_state=seed).fit(features.numpy())
    directions = torch.zeros_like(head.project.weight)
    directions[: found.n_components_] = torch.from_numpy(found.components_).float()
    head.project.weight.copy_(directions)
    head.project.bias.copy_(-directions @ torch.from_numpy(found.mean_).float().to(directions.device))
    moved = head.project(features.to(directions.device)).cpu().numpy()
    centres = KMeans(clusters, n_init=STARTS, random_state=seed).fit(moved).cluster_centers_
    head.centres.copy_(torch.from_numpy(centres))


def _head(model: DualBranchModel) -> CentreHead:
    head = model.branches[0].cluster_head
    assert isinstance(head, CentreHead)
    return head
