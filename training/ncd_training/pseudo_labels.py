"""How one branch judges pairs of unlabelled images: by whole images, or by their parts and the part dictionary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ncd_training.config import BranchKind, ModelConfig, PseudoLabelConfig
from ncd_training.dual_branch import Branch, BranchOutput
from ncd_training.part_sampling import all_parts, cam_parts, inner_parts, random_parts
from ncd_training.queues import PartDictionary
from ncd_training.ranking import cosine_scores, ranking_scores


class PseudoLabels(nn.Module):
    """The pairwise pseudo labels of a branch, with the part dictionary that they need."""

    def __init__(self, kind: BranchKind, dim: int, *, model: ModelConfig, labels: PseudoLabelConfig) -> None:
        super().__init__()
        self.kind, self.config = kind, labels
        self.sampling, self.border = model.dictionary_sampling, model.dictionary_border
        self.dictionary = PartDictionary(model.dictionary_size, dim)

    @torch.no_grad()
    def forward(self, output: BranchOutput, n: int) -> tuple[Tensor, Tensor]:
        """Which pairs of the images after the first `n` should agree, and which source says that they should differ."""
        sources = self.config.sources(self.kind)
        scores = {kind: self.scores(kind, self.compared(kind, output, n)) for kind in set(sources)}
        return scores[sources[0]], scores[sources[1]]

    @property
    def positive_source(self) -> BranchKind:
        """What says that two images should agree."""
        return self.config.sources(self.kind)[0]

    @torch.no_grad()
    def compared(self, kind: BranchKind, output: BranchOutput, n: int) -> Tensor:
        """What the images after the first `n` are compared by: [M, d] embeddings, or [M, e] spreads of their parts."""
        return output.embedding[n:] if kind == "global" else self._describe(self._parts(output), n)

    def scores(self, kind: BranchKind, features: Tensor) -> Tensor:
        """Pseudo labels [M, M] of images that are compared by `features`."""
        top_k = self.config.global_top_k if kind == "global" else self.config.local_top_k
        if self.config.score == "ranking":
            return ranking_scores(features, top_k=top_k, hard=self.config.hard)
        return cosine_scores(features, threshold=self.config.cosine_threshold if self.config.hard else None)

    def _describe(self, parts: Tensor, n: int) -> Tensor:
        if not len(self.dictionary.filled):
            # Nothing to compare with in the very first step: the batch's own mean parts stand in.
            self.dictionary.push(parts.mean(dim=(2, 3)))
        return self.dictionary.describe(parts[n:])

    @torch.no_grad()
    def remember(self, output: BranchOutput, labels: Tensor, *, branch: Branch, generator: torch.Generator) -> None:
        """Let this step's parts into the dictionary, if there are any."""
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
