"""What ways of learning without labels have in common: the network they teach, and what a batch taught it."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.objective.queues import FifoQueue

if TYPE_CHECKING:
    from ncd_training.config.schema import PretrainConfig
    from ncd_training.model.branches import Trunk


class Lesson(NamedTuple):
    """What a batch taught: the loss to descend, and the share of right answers."""

    loss: Tensor
    accuracy: Tensor


class TrunkAndTail(nn.Module):
    """A network in one piece, all of it learning."""

    def __init__(self, trunk: Trunk, tail: nn.Module) -> None:
        super().__init__()
        self.trunk, self.tail = trunk, tail
        self.trunk.stages.requires_grad_(True)

    def train(self, mode: bool = True) -> TrunkAndTail:
        """Unlike in discovery, the trunk's batch norm learns as well."""
        super().train(mode)
        self.trunk.stages.train(mode)
        return self

    def freeze(self) -> None:
        """Hand the trunk back as discovery needs it."""
        self.trunk.stages.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images [B, 3, H, W] to embeddings [B, d]."""
        maps = self.trunk(images.contiguous(memory_format=torch.channels_last))
        embedding: Tensor = self.tail(maps).embedding
        return embedding


TURNS = 4


class Rotations(nn.Module):
    """All four turns of every image in one batch, and a linear head that names the turn."""

    views = 1

    def __init__(self, network: TrunkAndTail, dim: int) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(dim, TURNS)

    def forward(self, images: Tensor) -> Lesson:
        """One view of each image, uint8 [B, 3, S, S]."""
        turned, turns = with_all_turns(images)
        logits = self.head(self.network(turned)).float()
        return Lesson(F.cross_entropy(logits, turns), (logits.argmax(dim=1) == turns).float().mean())


def with_all_turns(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images [B, 3, S, S] to [4B, 3, S, S], turn after turn, and the turn [4B] of each."""
    turned = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(TURNS)])
    return turned, torch.arange(TURNS, device=images.device).repeat_interleave(len(images))


class MomentumContrast(nn.Module):
    """A network that learns, a key network that follows it slowly, and a queue of the latest keys.

    MoCo shuffles images between GPUs, so that a view and its key are normalised beside different images and batch norm
    cannot give the answer away. This runs in one process, where there is nothing to shuffle between.
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

    def forward(self, first: Tensor, second: Tensor) -> Lesson:
        """Two views of each image, uint8 [B, 3, S, S] each. The second one's keys join the queue."""
        queries = F.normalize(self.head(self.network(first)).float())
        with torch.no_grad():
            follow(self.key_network, self.network, momentum=self._momentum)
            follow(self.key_head, self.head, momentum=self._momentum)
            keys = F.normalize(self.key_head(self.key_network(second)).float())
        # A copy: the queue moves on before the gradient is computed.
        lesson = contrast(queries, keys, self.queue.filled.clone(), temperature=self._temperature)
        self.queue.push(keys)
        return lesson


def contrast(queries: Tensor, keys: Tensor, others: Tensor, *, temperature: float) -> Lesson:
    """InfoNCE: queries [B, d] against their own keys [B, d] and other images' keys [Q, d], all of length 1.

    The accuracy is the share of queries that are nearer to their own key than to any other.
    """
    own = (queries * keys).sum(dim=1, keepdim=True)
    logits = torch.cat([own, queries @ others.T], dim=1) / temperature
    first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    return Lesson(F.cross_entropy(logits, first), (logits.argmax(dim=1) == first).float().mean())


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, *, momentum: float) -> None:
    """Each weight of the follower becomes momentum * itself + (1 - momentum) * the leader's."""
    for slow, fast in zip(follower.parameters(), leader.parameters(), strict=True):
        slow.mul_(momentum).add_(fast, alpha=1.0 - momentum)
