"""Recognition of known classes among unlabelled images. Pure functions of tensors; not in the paper.

An image of a known class has labelled images among its nearest neighbours. Around an image of a novel class, they are
mostly unlabelled. The meaning of a number of labelled neighbours is learned from hidden labels: of whole classes, which
play novel ones, and of single images of the other classes, which play unlabelled images of known classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIXED_SHARE = 0.15  # of known classes among the unlabelled images, from which they are recognised instead of ignored
_NEIGHBOURS = 10
_DRAWS = 10  # of hidden labels
_HIDDEN_CLASSES, _HIDDEN_IMAGES = 0.1, 0.2
_ROUNDS = 200  # of expectation and maximisation of one number
_CHUNK_ROWS = 256
_SMOOTHING = 0.5  # added to every count


class Recognition(NamedTuple):
    """Estimated share of images of known classes among the unlabelled ones, and each image's chance to be one."""

    share: float
    chances: Tensor  # [M]


def recognise(directions: Tensor, labels: Tensor, *, seed: int) -> Recognition:
    """Recognise known classes among unit rows: those of the labelled images [N] first, then the unlabelled ones [M]."""
    neighbours, generator = nearest_neighbours(directions, _NEIGHBOURS), torch.Generator().manual_seed(seed)
    counts = [_labelled_neighbours(neighbours, labels, generator) for _ in range(_DRAWS)]
    novel, known, unlabelled = (torch.stack(same) for same in zip(*counts, strict=True))
    return known_chances(novel.sum(dim=0), known.sum(dim=0), unlabelled)


def nearest_neighbours(directions: Tensor, count: int) -> Tensor:
    """Return the row numbers [N, count] of the other rows with the highest cosine to each unit row [N, d]."""
    count, found = min(count, len(directions) - 1), []
    for rows in torch.arange(len(directions)).split(_CHUNK_ROWS):
        cosines = directions[rows] @ directions.T
        cosines[torch.arange(len(rows)), rows] = -torch.inf
        found.append(cosines.topk(count, dim=1).indices)
    return torch.cat(found)


def known_chances(novel: Tensor, known: Tensor, unlabelled: Tensor) -> Recognition:
    """Return share and chances of known classes from numbers of labelled neighbours.

    `novel` and `known` [k + 1] count how many images that play these parts have 0 to k labelled neighbours;
    `unlabelled` [draws, M] has the numbers of the unlabelled images.
    """
    likely_novel, likely_known = ((played + _SMOOTHING) / (played + _SMOOTHING).sum() for played in (novel, known))
    found = torch.bincount(unlabelled.flatten(), minlength=len(novel)).double()
    share = 0.5
    for _ in range(_ROUNDS):
        chance = share * likely_known / (share * likely_known + (1 - share) * likely_novel)
        share = float((found * chance).sum() / found.sum())
    evidence = (likely_known / likely_novel).log()[unlabelled].mean(dim=0)
    prior = torch.tensor(share, dtype=torch.double).logit(eps=1e-6)
    return Recognition(share, (evidence + prior).sigmoid().float())


def _labelled_neighbours(
    neighbours: Tensor, labels: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Hide some labels; return histograms of labelled neighbours for both hidden kinds, and the unlabelled numbers."""
    classes, most = int(labels.max()) + 1, neighbours.shape[1] + 1
    hidden = torch.randperm(classes, generator=generator)[: max(1, round(_HIDDEN_CLASSES * classes))]
    novel = torch.isin(labels, hidden)
    known = ~novel & (torch.rand(len(labels), generator=generator) < _HIDDEN_IMAGES)
    labelled = torch.zeros(len(neighbours), dtype=torch.bool)
    labelled[: len(labels)] = ~(novel | known)
    numbers = labelled[neighbours].sum(dim=1)
    mine = numbers[: len(labels)]
    return (
        torch.bincount(mine[novel], minlength=most).double(),
        torch.bincount(mine[known], minlength=most).double(),
        numbers[len(labels) :],
    )
