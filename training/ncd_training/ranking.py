"""Pairwise pseudo labels s_ij in [0, 1]: do images i and j belong to one class? (Eq. 1 to 3)

All functions take features [M, D] and return scores [M, M] with ones on the diagonal. They are detached: pseudo
labels carry no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def ranking_scores(features: Tensor, *, top_k: int, hard: bool = False) -> Tensor:
    """Ranking statistics: the share of common indices among each pair's `top_k` largest entries.

    Soft: |A ∩ B| / k. Hard: 1 where the two index sets are equal, else 0.
    """
    top_k = min(top_k, features.shape[1])
    members = torch.zeros_like(features).scatter_(1, features.topk(top_k, dim=1).indices, 1.0)
    shared = members @ members.T
    return (shared == top_k).to(features.dtype) if hard else shared / top_k


@torch.no_grad()
def cosine_scores(features: Tensor, *, threshold: float | None = None) -> Tensor:
    """Cosine similarity clamped to [0, 1]; with a threshold, 1 where it is reached, else 0."""
    directions = F.normalize(features, dim=1)
    similarity = (directions @ directions.T).clamp(0.0, 1.0).fill_diagonal_(1.0)
    return similarity if threshold is None else (similarity >= threshold).to(features.dtype)
