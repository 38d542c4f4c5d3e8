"""Pseudo labels of pairs of unlabelled images: by whole images, or by their parts and the part dictionary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.config.schema import BranchKind, ModelConfig, PseudoLabelConfig
from ncd_training.model.branches import Branch, BranchOutput, Modules
from ncd_training.objective.queues import PartDictionary

_CALIBRATING_IMAGES = 64  # labelled images of a batch; comparing more of them costs more than it tells
_CALIBRATION_RATE = 0.05
_MAX_ODDS, _HALVINGS = 12.0, 30  # of the search for a constant of log odds


class PseudoLabels(nn.Module):
    """Pairwise pseudo labels of a branch, with the part dictionary that they need."""

    def __init__(self, kind: BranchKind, dim: int, *, model: ModelConfig, labels: PseudoLabelConfig) -> None:
        super().__init__()
        self.kind, self.config = kind, labels
        self.sampling, self.border = model.dictionary_sampling, model.dictionary_border
        self.dictionary = PartDictionary(model.dictionary_size, dim, similarity=model.dictionary_similarity)
        self._calibrated = sorted(set(labels.sources(kind))) if labels.calibrated else []
        self._calibrations: Modules[Calibration] = Modules(Calibration() for _ in self._calibrated)

    @torch.no_grad()
    def forward(self, output: BranchOutput, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return pseudo labels [M, M] for positive and for negative pairs of the images after those with `labels`."""
        sources = self.config.sources(self.kind)
        scores = {kind: self._judged(kind, output, labels) for kind in set(sources)}
        return scores[sources[0]], scores[sources[1]]

    def _judged(self, kind: BranchKind, output: BranchOutput, labels: Tensor) -> Tensor:
        if self.training and (calibration := self._calibration(kind)):
            some = labels[:_CALIBRATING_IMAGES]
            shown = BranchOutput(*(tensor[: len(some)] for tensor in output))
            calibration.learn(self._scores(kind, self.compared(kind, shown, 0)), some)
        return self.scores(kind, self.compared(kind, output, len(labels)), share=1 / output.cluster_logits.shape[1])

    @property
    def positive_source(self) -> BranchKind:
        """Source of the positive pairs."""
        return self.config.sources(self.kind)[0]

    @torch.no_grad()
    def compared(self, kind: BranchKind, output: BranchOutput, n: int) -> Tensor:
        """Return features for comparing the images after the first `n`: embeddings [M, d], or descriptions [M, e]."""
        return output.embedding[n:] if kind == "global" else self._describe(self._parts(output), n)

    def scores(self, kind: BranchKind, features: Tensor, *, share: float) -> Tensor:
        """Return pseudo labels [M, M] of images with these features; `share`: of pairs that are of one class."""
        scores, calibration = self._scores(kind, features), self._calibration(kind)
        return calibration(scores, share) if calibration else scores

    def _calibration(self, kind: BranchKind) -> Calibration | None:
        return self._calibrations[self._calibrated.index(kind)] if kind in self._calibrated else None

    def _scores(self, kind: BranchKind, features: Tensor) -> Tensor:
        top_k = self.config.global_top_k if kind == "global" else self.config.local_top_k
        if self.config.score == "ranking":
            if self.config.centred:
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


class Calibration(nn.Module):
    """Chance that two images are of one class, by their score; not in the paper.

    Labelled images teach how fast the chance grows with the score: scores of pairs of one class and of pairs of two are
    taken as normal with one variance, so that log odds are linear in them. The mean chance is that of equally large
    classes, since binary cross entropy on labels of another mean asks for another number of clusters.
    """

    moments: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Running means of the scores of pairs of one class and of two, and of their variance; 0 at the start.
        self.register_buffer("moments", torch.zeros(3))

    @torch.no_grad()
    def learn(self, scores: Tensor, labels: Tensor) -> None:
        """Move the moments towards those of the scores [N, N] of images with these labels [N]."""
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        parts = [scores[same & others], scores[~same]]
        if min(len(part) for part in parts):
            rest = torch.cat([part - part.mean() for part in parts])
            found = torch.stack([*(part.mean() for part in parts), rest.square().mean()])
            self.moments.copy_(torch.where(self.moments[2] == 0, found, self.moments.lerp(found, _CALIBRATION_RATE)))

    @torch.no_grad()
    def forward(self, scores: Tensor, share: float) -> Tensor:
        """Return the chances [M, M] of pairs with these scores, of which a `share` is of one class."""
        same, different, variance = self.moments
        odds = (same - different).clamp_min(0) / variance.clamp_min(1e-12) * scores
        pairs = odds[~torch.eye(len(odds), dtype=torch.bool, device=odds.device)]
        low, high = -pairs.amax() - _MAX_ODDS, -pairs.amin() + _MAX_ODDS
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = (pairs + middle).sigmoid().mean() > share
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (odds + (low + high) / 2).sigmoid().fill_diagonal_(1.0)


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
