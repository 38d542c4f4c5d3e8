"""Recognition of known classes among unlabelled images. Pure functions of tensors; not in the paper.

An image of a known class is near the mean of this class, and has labelled images of it among its nearest neighbours.
Around an image of a novel class, most are unlabelled, or of several known classes. The meaning of such evidence is
learned from hidden labels: of whole classes, which play novel ones of many sizes, and of single images of the others,
which play unlabelled images of known classes. Hidden labels have no part in the geometry, in which labelled classes
look tighter than classes that it has not seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
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
_EPSILON = 1e-12
# Of known against novel images whose labels are hidden, from which the evidence counts; two standard errors more, as
# few images may look separated by chance.
_MIN_AUROC = 0.7


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


def recognise(features: Tensor, labels: Tensor, *, shrinkage: float, dims: int, seed: int) -> Recognition:
    """Recognise known classes by features [N + M, d]: of images with these labels [N], then of the unlabelled ones."""
    generator, played, pile = torch.Generator().manual_seed(seed), [], []
    unlabelled = torch.arange(len(labels), len(features))
    for _ in range(_DRAWS):
        shown, *hidden = _hide(labels, generator)
        rows = torch.cat([shown, *hidden, unlabelled])
        moved = features[rows] @ class_whitening(features[shown], labels[shown], shrinkage=shrinkage)
        around = moved[-len(unlabelled) :].mean(dim=0)
        directions = main_directions(F.normalize(moved - around, dim=1), dims)
        pool = torch.randperm(len(rows), generator=generator)[:_MAX_POOL].sort().values
        *parts, others = evidence(directions, labels[shown], pool).split([*map(len, hidden), len(unlabelled)])
        played.append(parts)
        pile.append(others)
    kinds, found = [torch.cat(parts) for parts in zip(*played, strict=True)], torch.stack(pile)
    if not informative(kinds, images=len(labels)):
        return Recognition(torch.zeros(len(unlabelled)))
    return known_chances(likelihoods(kinds, found))


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


def informative(kinds: list[Tensor], *, images: int) -> bool:
    """Return True if the evidence of images that play known ones (the first kind) tells them from all others.

    They were drawn from this number of labelled `images`.
    """
    error = math.sqrt(_MIN_AUROC * (1 - _MIN_AUROC) / (images / 2))
    true = np.arange(sum(map(len, kinds))) < len(kinds[0])
    if true.all() or not true.any():
        return False
    found = likelihoods(kinds, torch.cat(kinds).unsqueeze(0))[0]
    return bool(roc_auc_score(true, (found[:, 0] - found[:, 1:].logsumexp(dim=1)).numpy()) >= _MIN_AUROC + 2 * error)


def likelihoods(kinds: list[Tensor], pile: Tensor) -> Tensor:
    """Return log likelihoods [draws, M, kinds] of the `pile`'s evidence [draws, M, e], up to a constant of each image.

    A logistic regression learns from the evidence of images of each kind, in which all kinds weigh the same. Kinds
    without images are unlikely.
    """
    rows, numbers = torch.cat(kinds), np.repeat(np.arange(len(kinds)), [len(some) for some in kinds])
    mean, spread = rows.mean(dim=0), rows.std(dim=0).clamp_min(1e-6)
    regression = LogisticRegression(class_weight="balanced").fit(((rows - mean) / spread).numpy(), numbers)
    found = torch.full((*pile.shape[:2], len(kinds)), -torch.inf, dtype=torch.double)
    for some, target in zip(pile, found, strict=True):
        learned = regression.predict_log_proba(((some - mean) / spread).double().numpy())
        target[:, regression.classes_] = torch.from_numpy(learned)
    return found


def known_chances(likelihoods: Tensor) -> Recognition:
    """Return the chances of the first kind from log likelihoods [draws, M, kinds].

    The share of each kind is the most likely one (expectation and maximisation).
    """
    shares = torch.full(likelihoods.shape[2:], 1 / likelihoods.shape[2], dtype=torch.double)
    for _ in range(_ROUNDS):
        shares = (likelihoods + shares.log()).softmax(dim=2).mean(dim=(0, 1)).clamp_min(_EPSILON)
    return Recognition((likelihoods.mean(dim=0) + shares.log()).softmax(dim=1)[:, 0].float())


def _hide(labels: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Hide some labels at random. Return the rows of images that are shown, that play known ones, and novel ones.

    Novel ones are apart by the share of their class that stays.
    """
    classes = int(labels.max()) + 1
    chosen = torch.randperm(classes, generator=generator)[: max(1, round(_HIDDEN_CLASSES * classes))]
    shares = torch.ones(classes)
    shares[chosen] = torch.tensor(_SIZES)[torch.randint(len(_SIZES), (len(chosen),), generator=generator)]
    luck, novel = torch.rand(len(labels), generator=generator), torch.isin(labels, chosen)
    known = ~novel & (luck < _HIDDEN_IMAGES)
    stays = novel & (luck < shares[labels])
    kinds = ~(novel | known), known, *(stays & (shares[labels] == share) for share in _SIZES)
    return [torch.nonzero(kind).flatten() for kind in kinds]
