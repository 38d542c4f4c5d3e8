"""Targets for the cluster heads, from clustering what the branches see of all unlabelled images; not in the paper.

Pairwise terms alone leave random heads far behind the features that they sit on. Here the heads start at the centres of
a clustering, and all branches are taught what their features, taken together, say; now and then that is asked again.
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

_MOST_LABELLED = 20_000  # enough to know how classes vary within themselves
_HEAD_SCALE = 10.0  # logits of a new head are about 10 times a cosine
_REFINING = 5


class Space(NamedTuple):
    """One branch's view of the unlabelled images."""

    transform: Tensor  # [d, d]
    centre: Tensor  # [d], after the transform
    directions: Tensor  # [M, d], unit rows


def due(config: TrainConfig, epoch: int) -> bool:
    """Whether targets are made anew before this epoch."""
    return config.self_labels.weight > 0 and epoch % config.self_labels.refresh_epochs == 0


def refresh(targets: Tensor, model: DualBranchModel, epoch: int, material: Material) -> None:
    """Fill in new targets [M, C] of the unlabelled images; the first ones also set the cluster heads."""
    labels, config = material.labels, material.config
    some = np.sort(np.random.default_rng(config.optim.seed).permutation(len(labels))[:_MOST_LABELLED])
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
    """Assignment [M, C] by what all branches see, from an earlier one or from the consensus of many starts."""
    settings, clusters = config.self_labels, config.data.novel_classes
    assert isinstance(clusters, int)
    reduced = [main_directions(space.directions, settings.dims) for space in spaces]
    together = F.normalize(torch.cat(reduced, dim=1), dim=1)
    if shares is None:
        asked = reduced if len(reduced) == 1 else [*reduced, together]
        shares = consensus_assignment(
            asked, clusters, temperature=settings.temperature, starts=settings.starts, seed=config.optim.seed
        )
    shares = refined_assignment(together, shares, temperature=settings.temperature, rounds=_REFINING)
    centres = F.normalize(shares.T @ together, dim=1)
    return balanced_assignment(together @ centres.T, temperature=settings.target_temperature)


def _space(features: Tensor, labels: Tensor, shrinkage: float) -> Space:
    """Labelled images come first."""
    transform = class_whitening(features[: len(labels)], labels, shrinkage=shrinkage)
    moved = features[len(labels) :] @ transform
    centre = moved.mean(dim=0)
    return Space(transform, centre, F.normalize(moved - centre, dim=1))


@torch.no_grad()
def _start_head(head: nn.Linear, space: Space, embedding: Tensor, targets: Tensor) -> None:
    """A linear head that measures the cosine to each cluster's centre in the branch's own space."""
    centres = F.normalize(targets.T @ space.directions, dim=1)
    length = (embedding @ space.transform - space.centre).norm(dim=1).mean()
    head.weight.copy_(_HEAD_SCALE * centres @ space.transform.T / length)
    if head.bias is not None:
        head.bias.copy_(-_HEAD_SCALE * centres @ space.centre / length)
