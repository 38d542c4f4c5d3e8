"""Targets for the cluster heads, from a clustering of all unlabelled images' features; not in the paper.

Trained with pairwise terms alone, random heads stay far below the quality of their features. Here the heads start at
the centres of a clustering and learn its assignments, which are refreshed every few epochs. The first clustering sees
the features before and after the supervised stage. With an open-world head, known classes among the unlabelled images
are recognised first, and the others are clustered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ncd_training.objective.clustering import (
    balanced_assignment,
    class_whitening,
    discovered_assignment,
    equal_by_clusters,
    main_directions,
    refined_assignment,
    sizes_look_equal,
)
from ncd_training.objective.method import Lesson, mean_over_views
from ncd_training.objective.recognition import recognise

if TYPE_CHECKING:
    from collections.abc import Callable

    from ncd_training.config.schema import SelfLabelConfig, TrainConfig
    from ncd_training.data.carried import Carried
    from ncd_training.model.branches import DualBranchModel
    from ncd_training.objective.method import Material

_MAX_LABELLED_IMAGES = 20_000  # enough for the variation within classes
_HEAD_SCALE = 10.0  # logits of a new head are about 10 times a cosine
_REFINING_ROUNDS = 5
_STRONGER = 4.0  # shrinkage of the second geometry, relative to the first: unlike clusterings agree on what is real


class Space(NamedTuple):
    """Whitened features of one branch."""

    transform: Tensor  # [d, d]
    centre: Tensor  # [d], of the unlabelled images after the transform
    labelled: Tensor  # [N, d], unit rows
    directions: Tensor  # [M, d], unit rows of the unlabelled images


class Start(NamedTuple):
    """First targets [M, C] of the unlabelled images; `equal`: their clusters are kept equally large."""

    targets: Tensor
    equal: bool


def due(config: TrainConfig, epoch: int) -> bool:
    """Return True if targets are refreshed before this epoch."""
    return config.self_labels.weight > 0 and epoch > 0 and epoch % config.self_labels.refresh_epochs == 0


def described(model: DualBranchModel, material: Material) -> tuple[Tensor, Tensor, Tensor]:
    """Return what images are clustered by, and embeddings, by the first branch; and labels, as `branch_features`."""
    first = model.branches[0]
    (descriptions, embeddings), labels = _seen(
        model, material, lambda maps: [first.tail.describe(maps), first(maps).embedding]
    )
    return descriptions, embeddings, labels


def branch_features(model: DualBranchModel, material: Material, *, epoch: int = 0) -> tuple[list[Tensor], Tensor]:
    """Return features of a sample of the labelled images and of all unlabelled ones, by branch; labels of the first."""
    return _seen(model, material, lambda maps: [output.embedding for output in model(maps)], epoch=epoch)


def _seen(
    model: DualBranchModel, material: Material, see: Callable[[Tensor], list[Tensor]], *, epoch: int = 0
) -> tuple[list[Tensor], Tensor]:
    config, labels = material.config, material.labels
    some = np.sort(np.random.default_rng(config.optim.seed).permutation(len(labels))[:_MAX_LABELLED_IMAGES])
    features = mean_over_views(
        model,
        material,
        [*some.tolist(), *material.unlabelled_rows],
        see,
        views=config.self_labels.views,
        epoch=epoch,
    )
    return features, labels[torch.from_numpy(some)]


def begin(model: DualBranchModel, material: Material, earlier: list[Tensor]) -> Start:
    """Cluster the unlabelled images by their present features and `earlier` ones, and set the cluster heads."""
    config = material.config
    descriptions, embedding, labels = described(model, material)
    start = _first_targets([*earlier, descriptions], labels, config)
    start = start._replace(targets=as_said(start.targets, material.carried, aligned=False))
    width = start.targets.shape[1]
    is_open = config.model.heads == "open_world"
    anchors = F.one_hot(labels, width).float() if is_open else torch.zeros(len(labels), width)
    space = _space(embedding, labels, config.self_labels.shrinkage)
    for branch in model.branches:  # all of them start from the same tail
        _start_head(branch.linear_cluster_head, space, embedding[len(labels) :], start.targets, anchors)
    return start


def with_clusters(lesson: Lesson, features: Tensor, labels: Tensor, material: Material) -> Lesson:
    """Add the surest unlabelled images to a lesson, with their clusters by features of the initial tail.

    `features` are those of images with these `labels`, then of the unlabelled ones. A stage that learns known classes
    alone forgets what separates others.
    """
    config = material.config
    if not config.self_labels.stage_share:
        return lesson
    targets = as_said(_first_targets([features], labels, config).targets, material.carried, aligned=False)
    sure, ids = targets.max(dim=1)
    kept = sure.argsort(descending=True, stable=True)[: round(config.self_labels.stage_share * len(ids))].sort().values
    first = 0 if config.model.heads == "open_world" or not len(labels) else int(lesson.classes.max()) + 1
    rows = np.concatenate([lesson.rows, len(material.labels) + kept.numpy()])
    return Lesson(rows, torch.cat([lesson.classes, first + ids[kept]]))


def _first_targets(sources: list[Tensor], labels: Tensor, config: TrainConfig) -> Start:
    """Return first targets of the unlabelled images from features of one or several sources, labelled images first."""
    clusters = config.data.novel_classes
    assert isinstance(clusters, int)
    if config.model.heads == "open_world":
        return Start(mixed_targets(sources, labels, clusters, config), equal=False)
    return novel_targets(Geometries(sources, labels, config.self_labels), clusters, config)


def refreshed(start: Start, model: DualBranchModel, epoch: int, material: Material) -> Tensor:
    """Return new targets [M, C] from the features of all branches, refined from the present ones."""
    settings = material.config.self_labels
    features, labels = branch_features(model, material, epoch=epoch)
    spaces = [_space(embedding, labels, settings.shrinkage) for embedding in features]
    both = [main_directions(torch.cat([space.labelled, space.directions]), settings.dims) for space in spaces]
    joined = F.normalize(torch.cat(both, dim=1), dim=1)
    labelled, together = joined[: len(labels)], joined[len(labels) :]
    shares, open_world = start.targets, material.config.model.heads == "open_world"
    anchors: Tensor | float = F.one_hot(labels, shares.shape[1]).float().T @ labelled if open_world else 0.0
    shares = refined_assignment(
        together,
        shares,
        temperature=settings.temperature,
        rounds=_REFINING_ROUNDS,
        equal=start.equal,
        anchors=anchors,
    )
    return as_said(_sharpened(together, shares, start.equal, settings, anchors), material.carried)


def as_said(targets: Tensor, carried: Carried | None, *, aligned: bool = True) -> Tensor:
    """Return targets [M, C] with what a person said about single images in an earlier generation.

    Unless they are `aligned`, clusters first get the columns of that generation that share most images with them.
    """
    if carried is None:
        return targets
    columns, first = torch.tensor(carried.columns), carried.first
    targets = targets.clone() if aligned else _aligned(targets, columns, first)
    wrong = torch.tensor(carried.wrong)
    rows = torch.nonzero(wrong >= 0).flatten()
    targets[rows, wrong[rows]] = 0.0
    targets[rows] /= targets[rows].sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    rows = torch.nonzero(torch.tensor(carried.said)).flatten()
    targets[rows] = F.one_hot(columns[rows], targets.shape[1]).to(targets.dtype)
    return targets


def _aligned(targets: Tensor, columns: Tensor, first: int) -> Tensor:
    """Return targets whose clusters are in the columns that share most images with them; the `first` ones stay."""
    now = targets.argmax(dim=1)
    shared = (columns >= first) & (now >= first)
    clusters = targets.shape[1] - first
    both = np.zeros((clusters, clusters))
    np.add.at(both, ((columns[shared] - first).numpy(), (now[shared] - first).numpy()), 1)
    _, partners = linear_sum_assignment(-both)
    return torch.cat([targets[:, :first], targets[:, first + torch.from_numpy(partners)]], dim=1)


def novel_targets(geometries: Geometries, clusters: int, config: TrainConfig, rows: Tensor | None = None) -> Start:
    """Return first targets of (some of) the unlabelled images, which all show novel classes."""
    settings, spaces = config.self_labels, geometries.spaces(rows)
    temperature, seed = settings.temperature, config.optim.seed
    equal = settings.sizes == "equal"
    # Who labels classes of unequal size has a pile of unequal ones.
    if settings.sizes == "auto" and geometries.known_look_equal:
        # The features before the supervised stage tell best whether classes are equally large.
        first, few = geometries.spaces(rows, sources=1), settings.starts // 2 or 1
        equal = equal_by_clusters(first, clusters, temperature=temperature, starts=few, seed=seed)
    shares = discovered_assignment(
        spaces, clusters, equal=equal, starts=settings.starts, temperature=temperature, seed=seed
    )
    return Start(_sharpened(spaces[-1], shares, equal, settings), equal)


def mixed_targets(sources: list[Tensor], labels: Tensor, clusters: int, config: TrainConfig) -> Tensor:
    """Return first targets [M, known + clusters] of images of known and novel classes.

    Images that are likely known go to the nearest class, the others are clustered. Then each image joins the nearest
    class or cluster. Those that joined no class are clustered once more, and each image chooses again.
    """
    geometries, settings = Geometries(sources, labels, config.self_labels), config.self_labels
    joint, known = geometries.joint(), int(labels.max()) + 1
    unlabelled, members = joint[len(labels) :], F.one_hot(labels, known + clusters).float()
    anchors = members.T @ joint[: len(labels)]
    chances = recognise(
        sources[0], labels, shrinkage=settings.shrinkage, dims=settings.dims, seed=config.optim.seed
    ).chances
    scores = unlabelled @ F.normalize(anchors[:known], dim=1).T
    ids = torch.where(chances > 0.5, scores.argmax(dim=1), known)
    for _ in range(2):
        rows = torch.nonzero(ids >= known).flatten()
        if len(rows) >= clusters:
            ids[rows] = known + novel_targets(geometries, clusters, config, rows).targets.argmax(dim=1)
        ids = _nearest(unlabelled, ids, anchors)
    shares = F.one_hot(ids, known + clusters).float()
    scores = unlabelled @ F.normalize(shares.T @ unlabelled + anchors, dim=1).T
    # A class is never a target of an image that was clustered, nor a cluster of an image that was recognised.
    apart = (ids >= known).unsqueeze(1) != (torch.arange(known + clusters) >= known).unsqueeze(0)
    return (scores.masked_fill(apart, -torch.inf) / settings.target_temperature).softmax(dim=1)


class Geometries:
    """Features of several sources in the geometry of the known classes, with weaker and stronger shrinkage."""

    def __init__(self, sources: list[Tensor], labels: Tensor, settings: SelfLabelConfig) -> None:
        self._labelled, self._dims = len(labels), settings.dims
        self.known_look_equal = not len(labels) or sizes_look_equal(labels, int(labels.max()) + 1)
        strengths = settings.shrinkage, min(1.0, _STRONGER * settings.shrinkage)
        self._moved = [
            features @ class_whitening(features[: len(labels)], labels, shrinkage=strength)
            for features in sources
            for strength in strengths
        ]

    def spaces(self, rows: Tensor | None = None, *, sources: int | None = None) -> list[Tensor]:
        """Return unit rows of (some of) the unlabelled images in every geometry, and at last of all sources joined."""
        chosen = [moved[self._labelled :] for moved in self._moved[: sources and 2 * sources]]
        chosen = chosen if rows is None else [moved[rows] for moved in chosen]
        reduced = [main_directions(_unit(moved, moved), self._dims) for moved in chosen]
        return [*reduced, F.normalize(torch.cat(reduced[::2], dim=1), dim=1)]

    def joint(self) -> Tensor:
        """Return unit rows of all images, labelled first, of all sources joined."""
        moved = [_unit(moved, moved[self._labelled :]) for moved in self._moved[::2]]
        return F.normalize(torch.cat([main_directions(rows, self._dims) for rows in moved], dim=1), dim=1)


def _nearest(directions: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """Let every unit row join the nearest centre, where labelled rows, summed in `anchors`, count for their class."""
    sums = anchors.clone().index_add_(0, ids, directions)
    return (directions @ F.normalize(sums, dim=1).T).argmax(dim=1)


def _sharpened(
    directions: Tensor, shares: Tensor, equal: bool, settings: SelfLabelConfig, anchors: Tensor | float = 0.0
) -> Tensor:
    """Return targets from the centres of an assignment; sizes of clusters are equal, or stay as they are."""
    scores = directions @ F.normalize(shares.T @ directions + anchors, dim=1).T
    sizes = None if equal else shares.mean(dim=0).clamp_min(torch.finfo(torch.float32).tiny)
    return balanced_assignment(scores, temperature=settings.target_temperature, sizes=sizes)


def _space(features: Tensor, labels: Tensor, shrinkage: float) -> Space:
    """Whiten the features of one branch; labelled images come first."""
    transform = class_whitening(features[: len(labels)], labels, shrinkage=shrinkage)
    moved = features @ transform
    unit = _unit(moved, moved[len(labels) :])
    return Space(transform, moved[len(labels) :].mean(dim=0), unit[: len(labels)], unit[len(labels) :])


def _unit(rows: Tensor, around: Tensor) -> Tensor:
    return F.normalize(rows - around.mean(dim=0), dim=1)


@torch.no_grad()
def _start_head(head: nn.Linear, space: Space, embedding: Tensor, targets: Tensor, members: Tensor) -> None:
    """Set a linear head to the cosine to each cluster's centre in the branch's own space.

    `members` [N, C] are the clusters of the labelled images, if these have any.
    """
    centres = F.normalize(targets.T @ space.directions + members.T @ space.labelled, dim=1)
    length = (embedding @ space.transform - space.centre).norm(dim=1).mean()
    head.weight.copy_(_HEAD_SCALE * centres @ space.transform.T / length)
    if head.bias is not None:
        head.bias.copy_(-_HEAD_SCALE * centres @ space.centre / length)
