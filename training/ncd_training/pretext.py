"""Training before discovery: pretext tasks without labels (RotNet, MoCo v2), and the stages of a run.

Each stage trains the first branch's tail; afterwards all branches start from a copy of it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from ncd_training.objective.queues import FifoQueue
from ncd_training.objective.stage_loop import StageLoop

if TYPE_CHECKING:
    from ncd_serve.progress import Track
    from ncd_training.config.schema import PretrainConfig, StageConfig, TrainConfig
    from ncd_training.data.views import Views
    from ncd_training.model.branches import DualBranchModel, Trunk
    from ncd_training.objective.stage_loop import StageLoss


class PretextLoss(NamedTuple):
    """Loss of a batch in a pretext task, and the share of right answers."""

    loss: Tensor
    accuracy: Tensor


class TrunkAndTail(nn.Module):
    """Backbone in one piece, all of which is trained."""

    def __init__(self, trunk: Trunk, tail: nn.Module) -> None:
        super().__init__()
        self.trunk, self.tail = trunk, tail
        self.trunk.stages.requires_grad_(True)

    def train(self, mode: bool = True) -> TrunkAndTail:
        """Set the mode, also of the trunk: unlike in discovery, its batch norm is trained."""
        super().train(mode)
        self.trunk.stages.train(mode)
        return self

    def freeze(self) -> None:
        """Freeze the trunk for discovery."""
        self.trunk.stages.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings [B, d] of uint8 images [B, 3, H, W]."""
        maps = self.trunk(images.contiguous(memory_format=torch.channels_last))
        embedding: Tensor = self.tail(maps).embedding
        return embedding


TURNS = 4


class Rotations(nn.Module):
    """Pretext task of RotNet: a linear head tells by which quarter turn an image was rotated. A batch has all four."""

    views = 1

    def __init__(self, network: TrunkAndTail, dim: int) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(dim, TURNS)

    def forward(self, images: Tensor) -> PretextLoss:
        """Return the loss of one view of each image, uint8 [B, 3, S, S]."""
        turned, turns = with_all_turns(images)
        logits = self.head(self.network(turned)).float()
        return PretextLoss(F.cross_entropy(logits, turns), (logits.argmax(dim=1) == turns).float().mean())


def with_all_turns(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [B, 3, S, S] in all four rotations [4B, 3, S, S], one turn after another, and their turns [4B]."""
    turned = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(TURNS)])
    return turned, torch.arange(TURNS, device=images.device).repeat_interleave(len(images))


class MomentumContrast(nn.Module):
    """Pretext task of MoCo: a network, a key network that is its running mean, and a queue of the latest keys.

    MoCo shuffles images between GPUs, so that a view and its key are normalised with different images and batch norm
    does not reveal the answer. Pretraining runs in one process, so images are not shuffled.
    """

    views = 2

    def __init__(self, network: TrunkAndTail, dim: int, settings: PretrainConfig) -> None:
        super().__init__()
        self.network = network
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(inplace=True), nn.Linear(dim, settings.key_size))
        self.key_network, self.key_head = deepcopy(network), deepcopy(self.head)
        self.key_network.requires_grad_(False)
        self.key_head.requires_grad_(False)
        self.queue = FifoQueue(settings.queue, settings.key_size)
        self._momentum, self._temperature = settings.key_momentum, settings.temperature

    def forward(self, first: Tensor, second: Tensor) -> PretextLoss:
        """Return the loss of two views of each image, uint8 [B, 3, S, S]. Keys of the second view join the queue."""
        queries = F.normalize(self.head(self.network(first)).float())
        with torch.no_grad():
            follow(self.key_network, self.network, momentum=self._momentum)
            follow(self.key_head, self.head, momentum=self._momentum)
            keys = F.normalize(self.key_head(self.key_network(second)).float())
        # A copy: the queue changes before the gradient is computed.
        result = contrast(queries, keys, self.queue.filled.clone(), temperature=self._temperature)
        self.queue.push(keys)
        return result


def contrast(queries: Tensor, keys: Tensor, others: Tensor, *, temperature: float) -> PretextLoss:
    """Return InfoNCE of queries [B, d] with their own keys [B, d] and other images' keys [Q, d], all of length 1.

    The accuracy is the share of queries that are nearer to their own key than to any other.
    """
    own = (queries * keys).sum(dim=1, keepdim=True)
    logits = torch.cat([own, queries @ others.T], dim=1) / temperature
    first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    return PretextLoss(F.cross_entropy(logits, first), (logits.argmax(dim=1) == first).float().mean())


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, *, momentum: float) -> None:
    """Set each weight of the follower to momentum * itself + (1 - momentum) * the leader's weight."""
    for slow, fast in zip(follower.parameters(), leader.parameters(), strict=True):
        slow.mul_(momentum).add_(fast, alpha=1.0 - momentum)


@dataclass(frozen=True)
class Stages:
    """Stages that train a model before discovery. With a `folder`, a stage resumes after its last finished epoch."""

    model: DualBranchModel
    config: TrainConfig
    track: Track
    folder: Path | None = None

    def rotations(self, views: Views, images: int) -> None:
        """Train trunk and tail to predict by how many quarter turns an image was rotated (RotNet). Uses no labels."""
        network = TrunkAndTail(self.model.trunk, self.model.branches[0].tail)
        task = Rotations(network, self.model.dim).to(self.model.device).train()

        def loss(pictures: Tensor, _rows: Tensor) -> Tensor:
            return task(pictures).loss

        self._train_tails("learning rotations", task, loss, views, images, self.config.rotations)
        network.freeze()

    def from_labels(self, views: Views, labels: Tensor) -> None:
        """Train trunk and tail on the known classes only (ablation without self-supervision)."""
        network = TrunkAndTail(self.model.trunk, self.model.branches[0].tail)
        classes = int(labels.max()) + 1
        task = nn.Sequential(network, nn.Linear(self.model.dim, classes)).to(self.model.device).train()
        targets = labels.to(self.model.device)

        def loss(pictures: Tensor, rows: Tensor) -> Tensor:
            return F.cross_entropy(task(pictures), targets[rows])

        self._train_tails("learning from labels", task, loss, views, len(labels), self.config.from_labels)
        network.freeze()

    def supervised(self, views: Views, labels: Tensor) -> None:
        """Train tail and heads on the frozen trunk, with cross entropy on known classes and, if any, clusters."""
        branch, targets = self.model.branches[0], labels.to(self.model.device)
        clusters, separate = int(labels.max()) >= branch.known, branch.known_head is not None

        def loss(inputs: Tensor, rows: Tensor) -> Tensor:
            output = branch(self.model.to_maps(inputs))
            logits = output.known_logits[:, : branch.known]
            if clusters:
                own = output.cluster_logits[:, 0 if separate else branch.known :]
                logits = torch.cat([logits, own], dim=1)
            return F.cross_entropy(logits, targets[rows])

        heads = [branch.labelled_head, *([branch.linear_cluster_head] if clusters and separate else [])]
        trained = nn.ModuleList([branch.tail, *heads])
        self._train_tails("supervised stage", trained, loss, views, len(labels), self.config.supervised)
        branch.lower_novel_biases()
        for other in self.model.branches:
            other.labelled_head.load_state_dict(branch.labelled_head.state_dict())

    def _train_tails(
        self, name: str, trained: nn.Module, loss: StageLoss, views: Views, images: int, stage: StageConfig
    ) -> None:
        """Train with Nesterov momentum and one cycle of the learning rate, then copy the tail to all branches."""
        optim = self.config.optim
        optimizer = torch.optim.SGD(
            trained.parameters(), stage.learning_rate, optim.momentum, weight_decay=5e-4, nesterov=True
        )
        loop = StageLoop(self.model, optim, self.config.data.workers, self.track, self.folder)
        plan = loop.plan(images, stage.batch)
        schedule = OneCycleLR(optimizer, stage.learning_rate, total_steps=stage.epochs * len(plan))
        self.model.branches.train()
        loop.run(
            name,
            trained,
            loss,
            optimizer=optimizer,
            schedule=schedule,
            views=views,
            plan=plan,
            epochs=stage.epochs,
        )
        for branch in self.model.branches:
            branch.tail.load_state_dict(self.model.branches[0].tail.state_dict())
