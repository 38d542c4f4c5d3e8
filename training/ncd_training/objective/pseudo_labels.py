"""Pseudo labels of pairs of unlabelled images: by whole images, or by their parts and the part dictionary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.config.schema import BranchKind, ModelConfig, PseudoLabelConfig
from ncd_training.model.branches import Branch, BranchOutput
from ncd_training.objective.queues import PartDictionary


class PseudoLabels(nn.Module):
    """Pairwise pseudo labels of a branch, with the part dictionary that they need."""

    def __init__(self, kind: BranchKind, dim: int, *, model: ModelConfig, labels: PseudoLabelConfig) -> None:
        super().__init__()
        self.kind, self.config = kind, labels
        self.sampling, self.border = model.dictionary_sampling, model.dictionary_border
        self.dictionary = PartDictionary(model.dictionary_size, dim, similarity=model.dictionary_similarity)

    @torch.no_grad()
    def forward(self, output: BranchOutput, n: int) -> tuple[Tensor, Tensor]:
        """Return pseudo labels [M, M] for positive and for negative pairs of the images after the first `n`."""
        sources = self.config.sources(self.kind)
        scores = {kind: self.scores(kind, self.compared(kind, output, n)) for kind in set(sources)}
        return scores[sources[0]], scores[sources[1]]

    @property
    def positive_source(self) -> BranchKind:
        """Source of the positive pairs."""
        return self.config.sources(self.kind)[0]

    @torch.no_grad()
    def compared(self, kind: BranchKind, output: BranchOutput, n: int) -> Tensor:
        """Return features for comparing the images after the first `n`: embeddings [M, d], or descriptions [M, e]."""
        return output.embedding[n:] if kind == "global" else self._describe(self._parts(output), n)

    def scores(self, kind: BranchKind, features: Tensor) -> Tensor:
        """Return pseudo labels [M, M] of images with these features."""
        top_k = self.config.global_top_k if kind == "global" else self.config.local_top_k
        if self.config.score == "ranking":
            if kind == "local" and self.config.local_centred:
                features = features - features.mean(dim=0)
            return ranking_scores(features, top_k=top_k, hard=self.config.hard)
        return cosine_scores(features, threshold=self.config.cosine_threshold if self.config.hard else None)

    def _describe(self, parts: Tensor, n: int) -> Tensor:
        if not len(self.dictionary.filled):
            # The dictionary is empty in the very first step: the batch's own mean parts fill it.
            self.dictionary.push(parts.mean(dim=(2, 3)))
        return self.dictionary.describe(parts[n:])

    @torch.no_grad()
    def remember(self, output: BranchOutput, labels: Tensor, *, branch: Branch, generator: torch.Generator) -> None:
        """Push this step's parts into the dictionary, if there are any."""
        parts = self._parts(output)
        if not parts.numel():
            return
        if self.sampling == "random":
            self.dictionary.push(random_parts(parts, generator))
        elif self.sampling == "all":
            self.dictionary.push(all_parts(parts))
        else:
            self.dictionary.push(cam_parts(parts, branch.class_weights(output, labels)))

    def _parts(self, output: BranchOutput) -> Tensor:
        return output.parts if self.border else inner_parts(output.parts)


@torch.no_grad()
def ranking_scores(features: Tensor, *, top_k: int, hard: bool = False) -> Tensor:
    """Return ranking statistics: the share of common indices among the `top_k` largest entries of each pair.

    Soft: |A ∩ B| / k. Hard: 1 where the two index sets are equal, else 0.
    """
    top_k = min(top_k, features.shape[1])
    members = torch.zeros_like(features).scatter_(1, features.topk(top_k, dim=1).indices, 1.0)
    shared = members @ members.T
    return (shared == top_k).to(features.dtype) if hard else shared / top_k


@torch.no_grad()
def cosine_scores(features: Tensor, *, threshold: float | None = None) -> Tensor:
    """Return the cosine similarity clamped to [0, 1]; with a threshold, 1 where it is reached, else 0."""
    directions = F.normalize(features, dim=1)
    similarity = (directions @ directions.T).clamp(0.0, 1.0).fill_diagonal_(1.0)
    return similarity if threshold is None else (similarity >= threshold).to(features.dtype)


_SMALL_MAP_SIDE = 4


def random_parts(parts: Tensor, generator: torch.Generator) -> Tensor:
    """Return one part of each image, at a uniformly random location."""
    batch, _, height, width = parts.shape
    return _at(parts, torch.randint(height * width, (batch,), generator=generator))


def all_parts(parts: Tensor) -> Tensor:
    """Return every part of every image."""
    return parts.flatten(2).transpose(1, 2).flatten(0, 1)


def cam_parts(parts: Tensor, class_weights: Tensor) -> Tensor:
    """Return the part of each image with the highest activation of its class, given head weights [B, d] (CAM)."""
    activation = torch.einsum("bdl,bd->bl", parts.flatten(2), class_weights)
    return _at(parts, activation.argmax(dim=1))


def inner_parts(parts: Tensor) -> Tensor:
    """Return maps without their outermost locations; maps up to 4x4 stay whole."""
    return parts[:, :, 1:-1, 1:-1] if min(parts.shape[2:]) > _SMALL_MAP_SIDE else parts


def _at(parts: Tensor, locations: Tensor) -> Tensor:
    rows = torch.arange(len(parts), device=parts.device)
    return parts.flatten(2)[rows, :, locations.to(parts.device, non_blocking=True)]
