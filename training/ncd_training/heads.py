"""From an embedding to logits. Whatever form a cluster head has, it is exported and served as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CosineHead(nn.Linear):
    """Compares directions: logits are 10 times the cosine of embedding and class weights (ORCA's regulariser)."""

    SCALE = 10.0

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes, bias=False)

    def forward(self, embedding: Tensor) -> Tensor:
        """Embedding [B, d] to logits [B, classes]."""
        return self.SCALE * F.linear(F.normalize(embedding, dim=1), F.normalize(self.weight, dim=1))


class CentreHead(nn.Module):
    """Compares with centres in a space of as many dimensions as there are clusters (DTC).

    The softmax of its logits is Student's t with one degree of freedom: q_k is in proportion to 1 / (1 + |z - mu_k|^2).
    """

    def __init__(self, dim: int, clusters: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, clusters)
        self.centres = nn.Parameter(torch.randn(clusters, clusters))

    def forward(self, embedding: Tensor) -> Tensor:
        """Embedding [B, d] to logits [B, clusters]."""
        offsets = self.project(embedding).unsqueeze(1) - self.centres
        return -torch.log1p(offsets.square().sum(dim=2))
