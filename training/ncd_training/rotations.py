"""RotNet: a network learns to tell by which quarter turn an image was rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.lessons import Lesson

if TYPE_CHECKING:
    from ncd_training.lessons import TrunkAndTail

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
