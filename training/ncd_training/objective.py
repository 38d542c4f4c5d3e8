"""The method on one screen: the sum of terms that the branches are trained with, and the memories it needs (Eq. 9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.config import BranchKind, LossConfig, ModelConfig, PseudoLabelConfig
from ncd_training.dual_branch import Branch, BranchOutput
from ncd_training.losses import (
    bank_log_probabilities,
    consistency,
    jensen_shannon,
    pairwise_bce,
    symmetric_kl,
)
from ncd_training.modules import Modules
from ncd_training.part_sampling import all_parts, cam_parts, random_parts
from ncd_training.queues import FeatureBanks, PartDictionary
from ncd_training.ranking import cosine_scores, ranking_scores


class Objective(nn.Module):
    """All terms for a batch whose labelled images come first. Holds the part dictionaries and the feature banks."""

    def __init__(
        self, kinds: list[BranchKind], dim: int, *, model: ModelConfig, labels: PseudoLabelConfig, loss: LossConfig
    ) -> None:
        super().__init__()
        self.kinds, self.label_config, self.loss = kinds, labels, loss
        self.sampling = model.dictionary_sampling
        self.banks = FeatureBanks(model.bank_size, dim, branches=len(kinds))
        self.dictionaries: Modules[PartDictionary] = Modules(PartDictionary(model.dictionary_size, dim) for _ in kinds)

    def forward(
        self, first: list[BranchOutput], second: list[BranchOutput], labels: Tensor, *, consistency_weight: float
    ) -> dict[str, Tensor]:
        """The terms by name; their sum is minimised. `labels` [N] are those of the first N images."""
        n = len(labels)
        pairs = list(zip(first, second, strict=True))
        terms: dict[str, Tensor] = {}
        if self.loss.pairwise:
            for number, (a, b) in enumerate(pairs):
                clusters = a.cluster_logits[n:].softmax(1), b.cluster_logits[n:].softmax(1)
                terms[f"pairwise_{self.branch_name(number)}"] = pairwise_bce(
                    *clusters, *self.pseudo_labels(number, a, n)
                )
        if self.loss.distillation and len(pairs) == 2 and len(self.banks.filled[0]):
            divergence = symmetric_kl if self.loss.divergence == "symmetric_kl" else jensen_shannon
            terms["distillation"] = divergence(
                *(
                    bank_log_probabilities(a.embedding[n:], bank, self.loss.temperature)
                    for a, bank in zip(first, self.banks.filled, strict=True)
                )
            )
        if self.loss.cross_entropy:
            terms["cross_entropy"] = torch.stack([F.cross_entropy(a.known_logits[:n], labels) for a in first]).sum()
        if self.loss.consistency:
            terms["consistency"] = (
                consistency_weight
                * torch.stack(
                    [
                        consistency(a.known_logits.softmax(1), b.known_logits.softmax(1))
                        + consistency(a.cluster_logits.softmax(1), b.cluster_logits.softmax(1))
                        for a, b in pairs
                    ]
                ).sum()
            )
        return terms

    def pseudo_labels(self, number: int, output: BranchOutput, n: int) -> tuple[Tensor, Tensor]:
        """Which pairs of the unlabelled images should agree, and which source says that they should differ."""
        own = self.kinds[number]
        sources = [
            own if name == "own" else name for name in (self.label_config.positives, self.label_config.negatives)
        ]
        scores = {kind: self._scores(kind, number, output, n) for kind in set(sources)}
        return scores[sources[0]], scores[sources[1]]

    def _scores(self, kind: BranchKind, number: int, output: BranchOutput, n: int) -> Tensor:
        if kind == "global":
            features, top_k = output.embedding[n:].detach(), self.label_config.global_top_k
        else:
            features, top_k = self._describe(number, output.parts.detach(), n), self.label_config.local_top_k
        if self.label_config.score == "ranking":
            return ranking_scores(features, top_k=top_k, hard=self.label_config.hard)
        return cosine_scores(features, threshold=self.label_config.cosine_threshold if self.label_config.hard else None)

    def _describe(self, number: int, parts: Tensor, n: int) -> Tensor:
        dictionary = self.dictionaries[number]
        if not len(dictionary.filled):
            # Nothing to compare with in the very first step: the batch's own mean parts stand in.
            dictionary.push(parts.mean(dim=(2, 3)))
        return dictionary.describe(parts[n:])

    @torch.no_grad()
    def remember(
        self, first: list[BranchOutput], labels: Tensor, *, branches: Modules[Branch], generator: torch.Generator
    ) -> None:
        """Enqueue this step's features, after they were compared with the past (all banks together)."""
        self.banks.push([output.embedding for output in first])
        for dictionary, branch, output in zip(self.dictionaries, branches, first, strict=True):
            if self.sampling == "random":
                dictionary.push(random_parts(output.parts, generator))
            elif self.sampling == "all":
                dictionary.push(all_parts(output.parts))
            else:
                dictionary.push(cam_parts(output.parts, branch.class_weights(output, labels)))

    def branch_name(self, number: int) -> str:
        """`global`, `local`, or `global2` for the second of a kind."""
        earlier = self.kinds[:number].count(self.kinds[number])
        return f"{self.kinds[number]}{earlier + 1 if earlier else ''}"
