"""Semi-supervised k-means of a pile, and heads that are set to its centres."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ncd_training.objective.constrained_kmeans import FREE, constrained_kmeans

if TYPE_CHECKING:
    from ncd_training.model.branches import Branch


@torch.no_grad()
def pile_ids(branch: Branch, features: Tensor, labels: Tensor, *, starts: int, seed: int) -> Tensor:
    """Return the output of the cluster head [M] that each unlabelled image belongs to, by k-means on unit rows.

    `features` are those of images with these `labels`, then of the unlabelled ones. In an open world, labelled images
    stay with their class; otherwise no unlabelled image shows a known class, and labelled images do not matter.
    """
    rows, width = F.normalize(features, dim=1), branch.linear_cluster_head.out_features
    fixed = torch.full((len(rows),), FREE)
    fixed[: len(labels)] = labels
    first = 0 if branch.known_head is None else len(labels)
    found = constrained_kmeans(rows[first:], fixed[first:], width, starts=starts, seed=seed)
    return found.ids[len(labels) - first :]


@torch.no_grad()
def centre_heads(branch: Branch, features: Tensor, labels: Tensor, ids: Tensor) -> None:
    """Set cosine heads to the directions of the known classes and of the clusters `ids` of the unlabelled images."""
    rows = F.normalize(features, dim=1)
    pile = class_sums(rows[len(labels) :], ids, branch.linear_cluster_head.out_features)
    if branch.known_head is None:
        branch.linear_cluster_head.weight.copy_(pile + class_sums(rows[: len(labels)], labels, len(pile)))
        return
    branch.linear_cluster_head.weight.copy_(pile)
    branch.known_head.weight.copy_(class_sums(rows[: len(labels)], labels, branch.known))


def class_sums(rows: Tensor, ids: Tensor, classes: int) -> Tensor:
    """Return the sum of the rows of each class [classes, d]."""
    return rows.new_zeros(classes, rows.shape[1]).index_add_(0, ids, rows)
