"""Pretext tasks for learning without labels: rotations (RotNet) and momentum contrast (MoCo v2)."""

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
