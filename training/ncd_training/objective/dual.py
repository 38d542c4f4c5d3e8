"""Method of the paper on one screen: the loss terms of both branches, and the memories that they need (Eq. 9)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ncd_serve.errors import UsageError
from ncd_training.config.schema import CompatConfig, LossConfig, ModelConfig, PseudoLabelConfig, SelfLabelConfig
from ncd_training.model.branches import Branch, BranchOutput, Modules
from ncd_training.objective import self_labels
from ncd_training.objective.losses import (
    bank_log_probabilities,
    consistency,
    jensen_shannon,
    pairwise_bce,
    squared_distance,
    symmetric_kl,
    uniform_divergence,
)
from ncd_training.objective.method import Batch, Lesson, Material, Method
from ncd_training.objective.pseudo_labels import PseudoLabels
from ncd_training.objective.queues import FeatureBanks

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel


class DualObjective(Method):
    """Objective of the paper. Computes the loss terms of a batch, and holds part dictionaries and feature banks."""

    name = "dual"
    title = "dual ranking statistics and mutual knowledge distillation (Zhao and Han, NeurIPS 2021)"
    takes_self_labels = True
    targets: Tensor | None
    equal_sizes: Tensor

    def __init__(
        self,
        dim: int,
        *,
        model: ModelConfig,
        labels: PseudoLabelConfig,
        loss: LossConfig,
        own_labels: SelfLabelConfig | None = None,
        compat: CompatConfig | None = None,
    ) -> None:
        super().__init__(model.branch_kinds)
        self.heads = model.heads
        self.loss, self.compat = loss, compat or CompatConfig()
        self.self_label_weight = (own_labels or SelfLabelConfig()).weight
        self.pseudo_labels = Modules(PseudoLabels(kind, dim, model=model, labels=labels) for kind in self.kinds)
        self.banks = FeatureBanks(model.bank_size, dim, branches=len(self.kinds))
        # Targets [M, C] of the unlabelled images from `self_labels`, None if unused; kept equally large or not.
        self.register_buffer("targets", None)
        self.register_buffer("equal_sizes", torch.tensor(True))
        # Runs of older versions always kept them equally large.
        self.register_load_state_dict_pre_hook(
            lambda _, tensors, prefix, *__: tensors.setdefault(f"{prefix}equal_sizes", torch.tensor(True))
        )
        self._earlier: list[Tensor] = []  # features before the supervised stage

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the objective of a configuration."""
        objective = cls(
            model.dim,
            model=config.model,
            labels=config.pseudo_labels,
            loss=config.loss,
            own_labels=config.self_labels,
            compat=config.compat,
        )
        if config.self_labels.weight:
            objective.targets = torch.zeros(images, model.branches[0].linear_cluster_head.out_features)
        return objective

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise UsageError if all loss terms are off."""
        super().check(config)
        loss = config.loss
        others = loss.balance_weight, config.self_labels.weight, config.model.heads == "joint"
        if not any((loss.pairwise, loss.cross_entropy, loss.consistency, *others)):
            raise UsageError(
                "all loss terms are off, or all except distillation, which has no effect before the banks are filled",
                hint="switch on another term in the section loss; `ncd-serve config show` lists all settings",
            )

    @classmethod
    def teaches_known_in(cls, config: TrainConfig) -> bool:
        """Return True if cross entropy on the known classes is among the loss terms."""
        return config.loss.cross_entropy

    def before_stages(self, model: DualBranchModel, material: Material) -> Lesson:
        """Keep the features of the initial tail, if clusters are made of features, and let the stage learn clusters."""
        lesson = super().before_stages(model, material)
        if self.targets is None or not material.config.supervised.epochs:
            return lesson
        first, _, labels = self_labels.described(model, material)
        self._earlier = [first]
        return self_labels.with_clusters(lesson, first, labels, material)

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Let the cluster heads start from a clustering (recipe `own-images`)."""
        if self.targets is not None:
            start = self_labels.begin(model, material, self._earlier)
            self.targets.copy_(start.targets)
            self.equal_sizes.fill_(start.equal)
            self._earlier = []

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Refresh the targets of the cluster heads every few epochs."""
        if self.targets is not None and self_labels.due(material.config, epoch):
            start = self_labels.Start(self.targets.cpu(), bool(self.equal_sizes))
            self.targets.copy_(self_labels.refreshed(start, model, epoch, material))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name; their sum is minimised (Eq. 9)."""
        first, second, labels, rows, ramp = batch
        n, loss = len(labels), self.loss
        pairs = list(zip(first, second, strict=True))
        terms: dict[str, Tensor] = {}
        if loss.pairwise:
            for number, (a, b) in enumerate(pairs):
                terms[f"pairwise_{self.branch_name(number)}"] = self._pairwise(number, a, b, labels)
        if loss.distillation and len(pairs) == 2 and len(self.banks.filled[0]):
            terms["distillation"] = self._distillation(first, second, n)
        if loss.cross_entropy:
            terms["cross_entropy"] = _total(F.cross_entropy(a.known_logits[:n], labels) for a in first)
        if loss.consistency:
            terms["consistency"] = loss.consistency_weight * ramp * _total(self._consistency(a, b, n) for a, b in pairs)
        if loss.balance_weight:
            terms["balance"] = loss.balance_weight * _total(uniform_divergence(a.cluster_logits) for a in first)
        if self.heads == "joint":
            terms["joint"] = loss.joint_weight * ramp * _total(_joint(a, n) for a in first)
        if self.targets is not None:
            terms["self_labels"] = self.self_label_weight * _total(
                F.cross_entropy(output.cluster_logits[n:], self.targets[rows]) / 2 for output in (*first, *second)
            )
        return terms

    def _pairwise(self, number: int, a: BranchOutput, b: BranchOutput, labels: Tensor) -> Tensor:
        other, n = a if number and self.compat.local_views == "one" else b, len(labels)
        positive, negative = self.pseudo_labels[number](a, labels)
        return pairwise_bce(a.cluster_logits[n:].softmax(1), other.cluster_logits[n:].softmax(1), positive, negative)

    def _distillation(self, first: list[BranchOutput], second: list[BranchOutput], n: int) -> Tensor:
        spreads = [
            bank_log_probabilities(
                a.embedding[n:],
                bank,
                self.loss.temperature,
                positive=b.embedding[n:].detach() if self.loss.bank_positive else None,
            )
            for a, b, bank in zip(first, second, self.banks.filled, strict=True)
        ]
        divergence = symmetric_kl if self.loss.divergence == "symmetric_kl" else jensen_shannon
        return divergence(*spreads)

    def _consistency(self, a: BranchOutput, b: BranchOutput, n: int) -> Tensor:
        known = a.known_logits.softmax(1), b.known_logits.softmax(1)
        clusters = a.cluster_logits.softmax(1), b.cluster_logits.softmax(1)
        if self.loss.consistency_form == "paper":
            return squared_distance(known[0][:n], known[1][:n]) + squared_distance(clusters[0][n:], clusters[1][n:])
        # In an open world there is one head, which counts once.
        return consistency(*clusters) + (consistency(*known) if self.heads != "open_world" else 0.0)

    @torch.no_grad()
    def remember(self, batch: Batch, *, branches: Modules[Branch], generator: torch.Generator) -> None:
        """Push this step's features into all banks together, after the loss compared them with earlier features."""
        self.banks.push([output.embedding for output in batch.first])
        for judge, branch, output in zip(self.pseudo_labels, branches, batch.first, strict=True):
            judge.remember(output, batch.labels, branch=branch, generator=generator)


class RankStat(DualObjective):
    """Objective with a single branch; the recipe `rankstat` has the settings."""

    name = "rankstat"
    title = "ranking statistics (Han et al., ICLR 2020)"


def _joint(output: BranchOutput, n: int) -> Tensor:
    """Return the cross entropy of RankStat's joint head on unlabelled images; targets are the cluster head's ids."""
    known = output.known_logits.shape[1] - output.cluster_logits.shape[1]
    return F.cross_entropy(output.known_logits[n:], known + output.cluster_logits[n:].argmax(dim=1))


def _total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()
