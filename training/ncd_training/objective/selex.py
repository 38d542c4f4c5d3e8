"""SelEx (Rastegar et al., ECCV 2024): contrast of a hierarchy of clusters, which is made anew as features improve.

Clusters keep their numbers from one clustering to the next (as in NC-GCD), so that served ones do, too.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ncd_training.base.matching import matched_clusters
from ncd_training.config.schema import Section
from ncd_training.objective.clustering import balanced_assignment, kmeans_ids
from ncd_training.objective.constrained_kmeans import FREE, centre_heads, class_sums, constrained_kmeans
from ncd_training.objective.contrast import CLASS_TEMPERATURE, VIEW_TEMPERATURE, Contrast, same_class, same_image
from ncd_training.objective.losses import contrastive
from ncd_training.objective.method import Batch, Material, Method
from ncd_training.objective.self_labels import branch_features

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel

_BALANCE_TEMPERATURE, _BALANCING_ROUNDS = 0.05, 10
_FAR = 2.0  # radii of its cluster, beyond which an image is not like another
_SMALLEST = 1e-6


class SelexSettings(Section):
    """Settings of the method selex."""

    supervised_weight: float = Field(0.35, ge=0, le=1)  # of classes and clusters, half each; views have the rest
    levels: int = Field(6, ge=1, le=8)  # of clusters; each has half as many as the one before
    smoothing: float = Field(1.0, ge=0, le=1)  # share of the views' targets that images far away are given
    balanced: bool = True  # clusters are equally large, labelled images included
    refresh_epochs: int = Field(1, ge=1)
    starts: int = Field(3, ge=1)  # of k-means


class Levels(NamedTuple):
    """Hierarchy of clusters, finest first; known classes and their groups have the first numbers of a level."""

    classes: Tensor  # [L, C_known], group of each known class
    pile: Tensor  # [L, M], cluster or group of each unlabelled image
    radii: Tensor  # [L, C], mean distance of a cluster's unit rows from their centre


class Selex(Method):
    """Method that contrasts images by known class, by clusters of every level, and by view."""

    name = "selex"
    title = "SelEx (Rastegar et al., ECCV 2024), with the cluster matching of NC-GCD"
    needs = MappingProxyType({"branches": "global", "head_form": "cosine"})
    teaches_known = True
    Settings = SelexSettings
    classes: Tensor
    pile: Tensor
    radii: Tensor

    def __init__(self, settings: SelexSettings, dim: int, *, known: int, clusters: int, images: int) -> None:
        super().__init__()
        self.settings, self.clusters = settings, clusters
        self.contrast = Contrast(dim)
        self.register_buffer("classes", torch.zeros(settings.levels, known, dtype=torch.long))
        self.register_buffer("pile", torch.zeros(settings.levels, images, dtype=torch.long))
        self.register_buffer("radii", torch.zeros(settings.levels, known + clusters))

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method with a projection for the contrast, and room for the hierarchy."""
        settings, known = SelexSettings.model_validate(config.method.own), model.branches[0].known
        return cls(settings, model.dim, known=known, clusters=clusters, images=images)

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Make the first hierarchy."""
        self._refresh(model, 0, material)

    def after_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Make the hierarchy anew every few epochs and at the end, and set the heads to the finest clusters."""
        if epoch % self.settings.refresh_epochs == 0 or epoch == material.config.optim.epochs:
            self._refresh(model, epoch, material)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name."""
        labels, seen = batch.labels, self.contrast.seen(batch)
        images, known = len(seen) // 2, len(labels)
        ids = torch.cat([self.classes[:, labels], self.pile[:, batch.rows]], dim=1)
        labelled = torch.cat([seen[:known], seen[images : images + known]])
        classes = contrastive(-distances(labelled) / CLASS_TEMPERATURE, same_class(labels))
        levels = [self._level(seen, own, number) for number, own in enumerate(ids)]
        views = contrastive(-distances(seen) / VIEW_TEMPERATURE, self._view_targets(batch, ids))
        taught = self.settings.supervised_weight
        return {
            "contrast": (1.0 - taught) * views,
            "supervised_contrast": taught / 2 * classes,
            "levels": taught / 2 * torch.stack(levels).sum(),
        }

    @staticmethod
    def _level(seen: Tensor, ids: Tensor, number: int) -> Tensor:
        """Return the contrast of a level, on a shorter part of the vectors the coarser it is."""
        part = F.normalize(seen[:, : seen.shape[1] >> (number + 1)], dim=1)
        return 2.0 ** -(number + 1) * contrastive(-distances(part) / CLASS_TEMPERATURE, same_class(ids))

    @torch.no_grad()
    def _view_targets(self, batch: Batch, ids: Tensor) -> Tensor:
        """Return targets [2 B, 2 B]: the other view and, as nothing is learned from pushing them, images far away."""
        rows = F.normalize(torch.cat([batch.first[0].embedding, batch.second[0].embedding]), dim=1)
        apart, other = distances(rows), same_image(ids.shape[1], rows.device).fill_diagonal_(0.0)
        far = other.clone()
        for number, own in enumerate(ids):
            limits = _FAR * self.radii[number, own].repeat(2)
            far += 2.0**-number * (apart > limits.unsqueeze(1))
        far.fill_diagonal_(0.0)
        smoothing = self.settings.smoothing
        return (1.0 - smoothing) * other + smoothing * far / far.sum(dim=1, keepdim=True)

    def _refresh(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        branch, seed = model.branches[0], material.config.optim.seed
        (features,), labels = branch_features(model, material, epoch=epoch)
        rows, mixed = F.normalize(features, dim=1), branch.known_head is None
        found = hierarchy(rows, labels, self.clusters, self.settings, mixed=mixed, seed=seed)
        if epoch:
            found.pile[0] = with_kept_ids(found.pile[0], self.pile[0].cpu(), first=branch.known)
            found.radii[0] = _radii(rows, torch.cat([labels, found.pile[0]]), self.radii.shape[1])
        for kept, new in zip((self.classes, self.pile, self.radii), found, strict=True):
            kept.copy_(new)
        centre_heads(branch, features, labels, found.pile[0] - (0 if mixed else branch.known))


def distances(rows: Tensor) -> Tensor:
    """Return Euclidean distances [B, B] of unit rows; those that coincide have no gradient."""
    return (2.0 - 2.0 * rows @ rows.T).clamp_min(_SMALLEST).sqrt()


def hierarchy(
    rows: Tensor, labels: Tensor, clusters: int, settings: SelexSettings, *, mixed: bool, seed: int
) -> Levels:
    """Cluster unit rows at every level; the first rows are labelled. `mixed`: others may show known classes, too."""
    known = int(labels.max()) + 1
    prototypes = F.normalize(class_sums(rows[: len(labels)], labels, known), dim=1)
    classes, pile, radii = [], [], []
    for level in range(settings.levels):
        groups, parts = -(-known >> level) or 1, max(1, clusters >> level)
        names = (
            torch.arange(known)
            if groups == known
            else torch.from_numpy(kmeans_ids(prototypes.numpy(), groups, seed=seed, starts=settings.starts))
        )
        ids = level_ids(rows, names[labels], groups, parts, settings, mixed=mixed, seed=seed)
        classes.append(names)
        pile.append(ids)
        radii.append(_radii(rows, torch.cat([names[labels], ids]), known + clusters))
    return Levels(torch.stack(classes), torch.stack(pile), torch.stack(radii))


def level_ids(
    rows: Tensor, groups: Tensor, known: int, clusters: int, settings: SelexSettings, *, mixed: bool, seed: int
) -> Tensor:
    """Return the group or cluster of each unlabelled row, counted from the groups of the labelled rows on."""
    first = 0 if mixed else len(groups)
    fixed = torch.full((len(rows),), FREE)
    fixed[: len(groups)] = groups
    number = clusters + (known if mixed else 0)
    ids = constrained_kmeans(rows[first:], fixed[first:], number, starts=settings.starts, seed=seed).ids
    own, ids = rows[len(groups) :], ids[len(groups) - first :]
    if settings.balanced:
        anchors = class_sums(rows[: len(groups)], groups, number) if mixed else torch.zeros(number, rows.shape[1])
        taken = torch.bincount(groups, minlength=number) if mixed else torch.zeros(number)
        room = ((len(own) + taken.sum()) / number - taken).clamp_min(1.0)
        ids = balanced_ids(own, ids, anchors, room)
    return ids if mixed else known + ids


def balanced_ids(rows: Tensor, ids: Tensor, anchors: Tensor, room: Tensor) -> Tensor:
    """Refine clusters of unit rows such that their sizes are in proportion to `room`; labelled rows are `anchors`."""
    shares = F.one_hot(ids, len(room)).float()
    for _ in range(_BALANCING_ROUNDS):
        scores = rows @ F.normalize(shares.T @ rows + anchors, dim=1).T
        shares = balanced_assignment(scores, temperature=_BALANCE_TEMPERATURE, sizes=room / room.sum())
    return shares.argmax(dim=1)


def with_kept_ids(ids: Tensor, before: Tensor, *, first: int) -> Tensor:
    """Renumber clusters, which are counted from `first`: each gets the number of the earlier one that it is most like.

    The matching is one-to-one, with as many rows as possible in the same cluster before and now.
    """
    both = (ids >= first) & (before >= first)
    if not both.any():
        return ids
    now, earlier = (part[both].numpy() - first for part in (ids, before))
    match = torch.from_numpy(matched_clusters(now, earlier))
    names = torch.arange(max(int(ids.max()) + 1, first + len(match)))
    names[first + match] = first + torch.arange(len(match))
    return names[ids]


def _radii(rows: Tensor, ids: Tensor, clusters: int) -> Tensor:
    sizes = torch.bincount(ids, minlength=clusters).clamp_min(1)
    centres = class_sums(rows, ids, clusters) / sizes.unsqueeze(1)
    away = (rows - centres[ids]).norm(dim=1)
    return torch.zeros(clusters).index_add_(0, ids, away) / sizes
