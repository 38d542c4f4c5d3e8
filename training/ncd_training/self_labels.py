"""Targets for the cluster heads, from clustering what the branches see of all unlabelled images; not in the paper.

Pairwise terms alone leave random heads far behind the features that they sit on. Here the heads start at the centres of
a clustering, and all branches are taught what their features, taken together, say; now and then that is asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ncd_training.clustering import (
    balanced_assignment,
    class_whitening,
    consensus_assignment,
    main_directions,
    refined_assignment,
)
from ncd_training.randomness import Purpose, seed_for
from ncd_training.views import CachedViews, FileViews, ViewRequest, batches

if TYPE_CHECKING:
    from ncd_training.checkpoint import TrainState
    from ncd_training.config import TrainConfig
    from ncd_training.dual_branch import Branch

_MOST_LABELLED = 20_000  # enough to know how classes vary within themselves
_HEAD_SCALE = 10.0  # logits of a new head are about 10 times a cosine
_REFINING = 5
_BATCH = 256


class Space(NamedTuple):
    """One branch's view of the unlabelled images."""

    transform: Tensor  # [d, d]
    centre: Tensor  # [d], after the transform
    directions: Tensor  # [M, d], unit rows


def due(config: TrainConfig, epoch: int) -> bool:
    """Whether targets are made anew before this epoch."""
    return config.self_labels.weight > 0 and epoch % config.self_labels.refresh_epochs == 0


def refresh(state: TrainState, views: FileViews | CachedViews, labels: Tensor, config: TrainConfig) -> None:
    """Give the objective new targets for its unlabelled images; the first ones also set the cluster heads."""
    targets = state.objective.targets
    assert targets is not None
    some = np.sort(np.random.default_rng(config.optim.seed).permutation(len(labels))[:_MOST_LABELLED])
    rows = [*some.tolist(), *range(len(labels), len(labels) + len(targets))]
    features, known = _features(state, views, rows, config), labels[torch.from_numpy(some)]
    spaces = [_space(embedding, known, config.self_labels.shrinkage) for embedding in features]
    first = not targets.any()
    targets.copy_(_clustered(spaces, None if first else targets.cpu(), config))
    if first:
        for branch, space, embedding in zip(state.model.branches, spaces, features, strict=True):
            _start_head(branch, space, embedding[len(known) :], targets.cpu())


def _clustered(spaces: list[Space], shares: Tensor | None, config: TrainConfig) -> Tensor:
    """Assignment [M, C] by what all branches see, from an earlier one or from the consensus of many starts."""
    settings, clusters = config.self_labels, config.data.novel_classes
    assert clusters is not None
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


@torch.no_grad()
def _features(state: TrainState, views: FileViews | CachedViews, rows: list[int], config: TrainConfig) -> list[Tensor]:
    """Mean embedding of each image over some views, [rows, d] for each branch."""
    settings, model = config.self_labels, state.model
    requests = [
        ViewRequest(
            row,
            tuple(seed_for(config.optim.seed, Purpose.SELF_LABELS, state.epoch, row, v) for v in range(settings.views)),
        )
        for row in rows
    ]
    loader = batches(
        views,
        [requests[start : start + _BATCH] for start in range(0, len(requests), _BATCH)],
        workers=config.data.workers,
    )
    model.eval()
    found = [
        [
            torch.stack(sights).mean(dim=0)
            for sights in zip(*[_embeddings(state, view) for view in stacked], strict=True)
        ]
        for stacked in loader
    ]
    return [torch.cat(column) for column in zip(*found, strict=True)]


def _embeddings(state: TrainState, inputs: Tensor) -> list[Tensor]:
    outputs = state.model(state.model.to_maps(state.model.placed(inputs)))
    return [output.embedding.float().cpu() for output in outputs]


def _space(features: Tensor, labels: Tensor, shrinkage: float) -> Space:
    """Labelled images come first."""
    transform = class_whitening(features[: len(labels)], labels, shrinkage=shrinkage)
    moved = features[len(labels) :] @ transform
    centre = moved.mean(dim=0)
    return Space(transform, centre, F.normalize(moved - centre, dim=1))


@torch.no_grad()
def _start_head(branch: Branch, space: Space, embedding: Tensor, targets: Tensor) -> None:
    """A linear head that measures the cosine to each cluster's centre in the branch's own space."""
    head, centres = branch.cluster_head, F.normalize(targets.T @ space.directions, dim=1)
    length = (embedding @ space.transform - space.centre).norm(dim=1).mean()
    head.weight.copy_(_HEAD_SCALE * centres @ space.transform.T / length)
    if head.bias is not None:
        head.bias.copy_(-_HEAD_SCALE * centres @ space.centre / length)
