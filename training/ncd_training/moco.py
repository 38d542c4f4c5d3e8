"""MoCo v2: a view of an image finds the key of its other view among the keys of many other images."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.lessons import Lesson
from ncd_training.queues import FifoQueue

if TYPE_CHECKING:
    from ncd_training.config import PretrainConfig
    from ncd_training.lessons import TrunkAndTail


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
