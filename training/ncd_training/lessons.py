"""What ways of learning without labels have in common: the network they teach, and what a batch taught it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ncd_training.dual_branch import Trunk


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
