"""KCL and MCL (Hsu, Lv & Kira, ICLR 2018 and 2019): similarity of pairs is transferred to unlabelled images.

First a similarity network learns from labelled images to tell pairs of the same class from other pairs. Then the
network judges all pairs of unlabelled images, and the cluster head learns to agree.
"""

from __future__ import annotations

from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

from ncd_training.config.schema import Section
from ncd_training.objective.losses import pairwise_bce
from ncd_training.objective.method import Batch, Material, Method, mean_over_views
from ncd_training.objective.stage_loop import StageLoop

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel

_EPSILON = 1e-7
_VIEWS = 4  # of each unlabelled image
_MILESTONES, _DECAY = (0.6, 0.8), 0.1  # fractions of the similarity network's epochs: 30 and 40 of 50


class SimilarityNetwork(nn.Module):
    """Network from pairs of embeddings side by side, [f_i, f_j], to logits of `different` and `alike`."""

    def __init__(self, tail: nn.Module, dim: int) -> None:
        super().__init__()
        self.tail = tail
        # A linear layer on two concatenated vectors is the sum of a layer on each, so a pair costs only an addition.
        self.left, self.right = nn.Linear(dim, 4 * dim), nn.Linear(dim, 4 * dim, bias=False)
        self.norm, self.judge = nn.BatchNorm1d(4 * dim), nn.Linear(4 * dim, 2)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the logits [B, B, 2] of all pairs of B images, from their trunk maps."""
        return self.compare(self.tail(maps).embedding)

    def compare(self, embedding: Tensor) -> Tensor:
        """Return the logits [B, B, 2] of all pairs of embeddings [B, d] that this network computed."""
        pairs = (self.left(embedding).unsqueeze(1) + self.right(embedding).unsqueeze(0)).flatten(0, 1)
        return self.judge(F.relu(self.norm(pairs))).unflatten(0, (len(embedding), len(embedding)))


class PairLearning(Method):
    """Base class of KCL and MCL: clusters agree with the similarity network on all pairs of a batch of both views."""

    needs = MappingProxyType({"branches": "global", "heads": "separate"})
    seen: Tensor

    def __init__(self, tail: nn.Module, dim: int, *, images: int, settings: Section) -> None:
        super().__init__()
        self.settings = settings
        self.similarity = SimilarityNetwork(deepcopy(tail), dim).requires_grad_(False)
        # The network does not change during discovery, so each image is embedded once.
        self.register_buffer("seen", torch.zeros(images, dim))

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method with a similarity network that starts from the branch's tail."""
        settings = cls.Settings.model_validate(config.method.own)
        return cls(model.branches[0].tail, model.dim, images=images, settings=settings)

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Train the similarity network on the known classes, then embed the unlabelled images with it."""
        network = self.similarity
        network.tail.load_state_dict(model.branches[0].tail.state_dict())
        if material.config.similarity.epochs:
            train_similarity(network.requires_grad_(True), model, material)
        network.requires_grad_(False).eval()
        rows = material.unlabelled_rows
        (seen,) = mean_over_views(model, material, rows, lambda maps: [network.tail(maps).embedding], views=_VIEWS)
        self.seen.copy_(seen)

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Set the similarity network to eval mode: a resumed run begins in training mode."""
        self.similarity.eval()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss term of all pairs."""
        alike = self.similarity.compare(self.seen[torch.cat([batch.rows, batch.rows])]).argmax(dim=2).float()
        logits = [view[0].cluster_logits[len(batch.labels) :] for view in (batch.first, batch.second)]
        clusters = torch.cat(logits).softmax(dim=1)
        return {"pairwise": self.cost(clusters, alike)}

    def cost(self, clusters: Tensor, alike: Tensor) -> Tensor:
        """Return the loss of cluster probabilities [B, C]; `alike` [B, B] is 1 for pairs of the same class, else 0."""
        raise NotImplementedError


class KclSettings(Section):
    """Settings of the method kcl."""

    margin: float = Field(2.0, ge=0)


class Kcl(PairLearning):
    """Method of the constrained clustering network: KL divergences of pairs."""

    name = "kcl"
    title = "a constrained clustering network (Hsu, Lv and Kira, ICLR 2018)"
    Settings = KclSettings
    settings: KclSettings

    def cost(self, clusters: Tensor, alike: Tensor) -> Tensor:
        """Return the KL divergences of all pairs."""
        return pairwise_kl(clusters, alike, margin=self.settings.margin)


class Mcl(PairLearning):
    """Method of the meta classification likelihood: binary cross entropy of pairs."""

    name = "mcl"
    title = "meta classification likelihood (Hsu et al., ICLR 2019)"

    def cost(self, clusters: Tensor, alike: Tensor) -> Tensor:
        """Return the binary cross entropy of all pairs."""
        return pairwise_bce(clusters, clusters, alike)


def train_similarity(network: SimilarityNetwork, model: DualBranchModel, material: Material) -> None:
    """Train the similarity network with cross entropy on all pairs of labelled images in a batch."""
    stage, labels = material.config.similarity, material.labels.to(model.device)

    def loss(inputs: Tensor, rows: Tensor) -> Tensor:
        own = labels[rows]
        alike = (own.unsqueeze(0) == own.unsqueeze(1)).long()
        return F.cross_entropy(network(model.to_maps(inputs)).flatten(0, 1), alike.flatten())

    config = material.config
    loop = StageLoop(model, config.optim, config.data.workers, material.track, material.stages)
    plan = loop.plan(len(labels), stage.batch)
    optimizer = torch.optim.Adam(network.parameters(), stage.learning_rate)
    milestones = [round(share * stage.epochs * len(plan)) for share in _MILESTONES]
    network.train()
    loop.run(
        "learning which pairs are alike",
        network,
        loss,
        optimizer=optimizer,
        schedule=MultiStepLR(optimizer, milestones, _DECAY),
        views=material.views,
        plan=plan,
        epochs=stage.epochs,
    )


def pairwise_kl(clusters: Tensor, alike: Tensor, *, margin: float) -> Tensor:
    """Return KCL's loss: both KL divergences of a pair shrink if `alike`, and grow up to a margin if not.

    `clusters` [B, C] are probabilities; in KL(p_i || p_j) the gradient flows into p_j alone. Mean over all pairs.
    """
    logs = clusters.clamp_min(_EPSILON).log()
    target = clusters.detach()
    divergence = (target * logs.detach()).sum(dim=1, keepdim=True) - target @ logs.T
    cost = torch.where(alike > 0, divergence, F.relu(margin - divergence))
    return (cost + cost.T).mean()
