"""Targets for the cluster heads, from a clustering of all unlabelled images' features; not in the paper.

Trained with pairwise terms alone, random heads stay far below the quality of their features. Here the heads start at
the centres of a clustering of all branches' features and learn its assignments, which are refreshed every few epochs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.objective.clustering import (
    balanced_assignment,
    class_whitening,
    consensus_assignment,
    main_directions,
    refined_assignment,
)
from ncd_training.objective.method import mean_over_views

if TYPE_CHECKING:
    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel
    from ncd_training.objective.method import Material

_MAX_LABELLED_IMAGES = 20_000  # enough for the variation within classes
_HEAD_SCALE = 10.0  # logits of a new head are about 10 times a cosine
_REFINING_ROUNDS = 5


class Space(NamedTuple):
    """Whitened features of one branch for the unlabelled images."""

    transform: Tensor  # [d, d]
    centre: Tensor  # [d], after the transform
    directions: Tensor  # [M, d], unit rows


def due(config: TrainConfig, epoch: int) -> bool:
    """Return True if targets are refreshed before this epoch."""
    return config.self_labels.weight > 0 and epoch % config.self_labels.refresh_epochs == 0


def refresh(targets: Tensor, model: DualBranchModel, epoch: int, material: Material) -> None:
    """Fill in new targets [M, C] of the unlabelled images; the first refresh also sets the cluster heads."""
    labels, config = material.labels, material.config
    some = np.sort(np.random.default_rng(config.optim.seed).permutation(len(labels))[:_MAX_LABELLED_IMAGES])
    rows, known = [*some.tolist(), *material.unlabelled_rows], labels[torch.from_numpy(some)]
    features = mean_over_views(
        model,
        material,
        rows,
        lambda maps: [output.embedding for output in model(maps)],
        views=config.self_labels.views,
        epoch=epoch,
    )
    spaces = [_space(embedding, known, config.self_labels.shrinkage) for embedding in features]
    first = not targets.any()
    targets.copy_(_clustered(spaces, None if first else targets.cpu(), config))
    if first:
        for branch, space, embedding in zip(model.branches, spaces, features, strict=True):
            _start_head(branch.linear_cluster_head, space, embedding[len(known) :], targets.cpu())


def _clustered(spaces: list[Space], shares: Tensor | None, config: TrainConfig) -> Tensor:
    """Return an assignment [M, C] from all branches' features; start from `shares`, or from a consensus if None."""
    settings, clusters = config.self_labels, config.data.novel_classes
    assert isinstance(clusters, int)
    reduced = [main_directions(space.directions, settings.dims) for space in spaces]
    together = F.normalize(torch.cat(reduced, dim=1), dim=1)
    if shares is None:
        clustered = reduced if len(reduced) == 1 else [*reduced, together]
        shares = consensus_assignment(
            clustered, clusters, temperature=settings.temperature, starts=settings.starts, seed=config.optim.seed
        )
    shares = refined_assignment(together, shares, temperature=settings.temperature, rounds=_REFINING_ROUNDS)
    centres = F.normalize(shares.T @ together, dim=1)
    return balanced_assignment(together @ centres.T, temperature=settings.target_temperature)


def _space(features: Tensor, labels: Tensor, shrinkage: float) -> Space:
    """Whiten the features of one branch; labelled images come first."""
    transform = class_whitening(features[: len(labels)], labels, shrinkage=shrinkage)
    moved = features[len(labels) :] @ transform
    centre = moved.mean(dim=0)
    return Space(transform, centre, F.normalize(moved - centre, dim=1))


@torch.no_grad()
def _start_head(head: nn.Linear, space: Space, embedding: Tensor, targets: Tensor) -> None:
    """Set a linear head to the cosine to each cluster's centre in the branch's own space."""
    centres = F.normalize(targets.T @ space.directions, dim=1)
    length = (embedding @ space.transform - space.centre).norm(dim=1).mean()
    head.weight.copy_(_HEAD_SCALE * centres @ space.transform.T / length)
    if head.bias is not None:
        head.bias.copy_(-_HEAD_SCALE * centres @ space.centre / length)
