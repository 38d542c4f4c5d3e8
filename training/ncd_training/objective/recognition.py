"""Recognition of known classes among unlabelled images. Pure functions of tensors; not in the paper.

An image of a known class is near the mean of this class, and has labelled images of it among its nearest neighbours.
Around an image of a novel class, most are unlabelled, or of several known classes. The meaning of such evidence is
learned from hidden labels: of whole classes, which play novel ones of many sizes, and of single images of the others,
which play unlabelled images of known classes. Hidden labels have no part in the geometry, in which labelled classes
look tighter than classes that it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from ncd_training.objective.clustering import class_whitening, main_directions

# Share of the unlabelled images that more likely show known classes, from which these are recognised instead of
# ignored.
MIXED_SHARE = 0.1
_NEIGHBOURS = 10
_DRAWS = 8  # of hidden labels
_HIDDEN_CLASSES, _HIDDEN_IMAGES = 0.15, 0.2
_SIZES = (1.0, 0.5, 0.25, 0.1)  # of a hidden class that stays: novel classes may have fewer images than known ones
_ROUNDS = 200  # of expectation and maximisation of one number
_CHUNK_ROWS = 256
_MAX_POOL = 20_000  # images among which neighbours are searched; a sample of more


class Recognition(NamedTuple):
    """Each unlabelled image's chance to show a known class."""

    chances: Tensor  # [M]

    @property
    def share(self) -> float:
        """Estimated share of images of known classes."""
        return float(self.chances.mean())

    @property
    def mixed(self) -> bool:
        """True if enough images more likely show a known class than a novel one."""
        return float((self.chances > 0.5).float().mean()) >= MIXED_SHARE


class _Hidden(NamedTuple):
    """Rows of labelled images that keep their labels, that play novel classes, and that play unlabelled known ones."""

    labelled: Tensor
    novel: Tensor
    known: Tensor


def recognise(features: Tensor, labels: Tensor, *, shrinkage: float, dims: int, seed: int) -> Recognition:
    """Recognise known classes by features [N + M, d]: of images with these labels [N], then of the unlabelled ones."""
    generator, found = torch.Generator().manual_seed(seed), []
    unlabelled = torch.arange(len(labels), len(features))
    for _ in range(_DRAWS):
        hidden = _hidden(labels, generator)
        shown, rows = labels[hidden.labelled], torch.cat([*hidden, unlabelled])
        moved = features[rows] @ class_whitening(features[hidden.labelled], shown, shrinkage=shrinkage)
        around = moved[-len(unlabelled) :].mean(dim=0)
        directions = main_directions(F.normalize(moved - around, dim=1), dims)
        pool = torch.randperm(len(rows), generator=generator)[:_MAX_POOL].sort().values
        found.append(evidence(directions, shown, pool).split([*map(len, hidden[1:]), len(unlabelled)]))
    novel, known, others = zip(*found, strict=True)
    return known_chances(torch.stack([*log_ratios(torch.cat(novel), torch.cat(known), others)]))


def evidence(directions: Tensor, labels: Tensor, pool: Tensor) -> Tensor:
    """Return evidence [N - n, 3] for unit rows [N, d] after the first n, which have these labels.

    Columns are the cosine to the nearest class mean, the number of labelled neighbours among the rows in `pool`, and
    the largest number of one class.
    """
    classes = int(labels.max()) + 1 if len(labels) else 1
    sums = torch.zeros(classes, directions.shape[1]).index_add_(0, labels, directions[: len(labels)])
    nearest = (directions[len(labels) :] @ F.normalize(sums, dim=1).T).amax(dim=1)
    named = torch.full((len(directions),), -1)
    named[: len(labels)] = labels
    near = named[nearest_neighbours(directions, pool, _NEIGHBOURS)][len(labels) :]
    votes = ((near.unsqueeze(2) == near.unsqueeze(1)) & (near >= 0).unsqueeze(2)).sum(dim=2).amax(dim=1)
    return torch.stack([nearest, (near >= 0).sum(dim=1).float(), votes.float()], dim=1)


def nearest_neighbours(directions: Tensor, pool: Tensor, count: int) -> Tensor:
    """Return the row numbers [N, count] of the rows in `pool` with the highest cosine to each unit row [N, d].

    No row is its own neighbour.
    """
    count, found = min(count, len(pool) - 1), []
    places = torch.full((len(directions),), -1)
    places[pool] = torch.arange(len(pool))
    for rows in torch.arange(len(directions)).split(_CHUNK_ROWS):
        cosines = directions[rows] @ directions[pool].T
        inside = torch.nonzero(places[rows] >= 0).flatten()
        cosines[inside, places[rows[inside]]] = -torch.inf
        found.append(pool[cosines.topk(count, dim=1).indices])
    return torch.cat(found)


def log_ratios(novel: Tensor, known: Tensor, others: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield log likelihood ratios [M], known against novel, of `others` [M, e] by evidence of images that play these.

    A logistic regression learns them, in which both kinds weigh the same. Without images of both, all are 0.
    """
    if not (len(novel) and len(known)):
        yield from (some.new_zeros(len(some)).double() for some in others)
        return
    rows, true = torch.cat([novel, known]), np.arange(len(novel) + len(known)) >= len(novel)
    mean, spread = rows.mean(dim=0), rows.std(dim=0).clamp_min(1e-6)
    regression = LogisticRegression(class_weight="balanced").fit(((rows - mean) / spread).numpy(), true)
    for some in others:
        yield torch.from_numpy(regression.decision_function(((some - mean) / spread).numpy()))


def known_chances(ratios: Tensor) -> Recognition:
    """Return the chances to be known from log likelihood ratios [draws, M]; their share is found by its likelihood."""
    prior = torch.tensor(0.5, dtype=torch.double)
    for _ in range(_ROUNDS):
        prior = (ratios + prior.logit(eps=1e-6)).sigmoid().mean()
    return Recognition((ratios.mean(dim=0) + prior.logit(eps=1e-6)).sigmoid().float())


def _hidden(labels: Tensor, generator: torch.Generator) -> _Hidden:
    """Hide some labels at random; of hidden classes, only some images stay."""
    classes = int(labels.max()) + 1
    chosen = torch.randperm(classes, generator=generator)[: max(1, round(_HIDDEN_CLASSES * classes))]
    shares = torch.ones(classes)
    shares[chosen] = torch.tensor(_SIZES)[torch.randint(len(_SIZES), (len(chosen),), generator=generator)]
    luck, novel = torch.rand(len(labels), generator=generator), torch.isin(labels, chosen)
    known = ~novel & (luck < _HIDDEN_IMAGES)
    kinds = ~(novel | known), novel & (luck < shares[labels]), known
    return _Hidden(*(torch.nonzero(kind).flatten() for kind in kinds))
