"""Contrast of views and of known classes, in a small space behind the embedding: terms of GCD that others share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.objective.losses import contrastive

if TYPE_CHECKING:
    from ncd_training.objective.method import Batch

_HIDDEN, _DIMS = 2048, 256
VIEW_TEMPERATURE, CLASS_TEMPERATURE = 1.0, 0.07


class ContrastTerms(NamedTuple):
    """Terms of a batch: two views of an image are alike, and so are labelled images of a class."""

    views: Tensor
    classes: Tensor


class Contrast(nn.Module):
    """Projection of embeddings to unit vectors, and the contrast of a batch there; trained, never served."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.Linear(dim, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _DIMS)
        )

    def forward(self, batch: Batch) -> ContrastTerms:
        """Return both terms of the first branch's embeddings."""
        seen = self.seen(batch)
        images, known = len(seen) // 2, len(batch.labels)
        labelled = torch.cat([seen[:known], seen[images : images + known]])
        return ContrastTerms(
            contrastive(seen @ seen.T / VIEW_TEMPERATURE, same_image(images, seen.device)),
            contrastive(labelled @ labelled.T / CLASS_TEMPERATURE, same_class(batch.labels)),
        )

    def seen(self, batch: Batch) -> Tensor:
        """Return unit vectors [2 B, d] of the first views, then of the second views."""
        views = torch.cat([batch.first[0].embedding, batch.second[0].embedding])
        return F.normalize(self.project(views), dim=1)


def same_image(images: int, device: torch.device) -> Tensor:
    """Return which of [2 B, 2 B] pairs of views show the same image."""
    return torch.eye(images, device=device).repeat(2, 2)


def same_class(labels: Tensor) -> Tensor:
    """Return which of [2 B, 2 B] pairs of views show images with the same label."""
    return (labels.unsqueeze(0) == labels.unsqueeze(1)).repeat(2, 2)
