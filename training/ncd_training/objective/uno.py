"""UNO (Fini et al., ICCV 2021): one cross entropy for known classes and balanced clusters, swapped between views."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ncd_training.config.schema import Section
from ncd_training.model.branches import CosineHead, Modules
from ncd_training.objective.clustering import balanced_assignment
from ncd_training.objective.method import Batch, Material, Method

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import Branch, BranchOutput, DualBranchModel


class UnoSettings(Section):
    """Settings of the method uno."""

    heads: int = Field(4, ge=1)  # cluster heads, and as many finer ones; the one with the lowest loss is served
    fineness: int = Field(3, ge=1)  # clusters of a finer head for every cluster that is asked for
    target_temperature: float = Field(0.05, gt=0)  # epsilon of Sinkhorn's algorithm


class Uno(Method):
    """Method with several cluster heads, which the known classes' outputs stand beside in one softmax."""

    name = "uno"
    title = "UNO (Fini et al., ICCV 2021)"
    needs = MappingProxyType({"branches": "global", "head_form": "cosine"})
    teaches_known = True
    Settings = UnoSettings

    def __init__(self, settings: UnoSettings, dim: int, *, known: int, clusters: int, open_world: bool) -> None:
        super().__init__()
        self.settings, self.known, self.open_world = settings, known, open_world
        self.heads: Modules[CosineHead] = Modules(CosineHead(dim, clusters) for _ in range(settings.heads))
        self.finer: Modules[CosineHead] = Modules(
            CosineHead(dim, settings.fineness * clusters) for _ in range(settings.heads)
        )
        # Of this epoch; the best head is chosen at its end, so a resume does not need them.
        self.losses = self.last_losses = torch.zeros(settings.heads)

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method with its heads."""
        settings, open_world = UnoSettings.model_validate(config.method.own), config.model.heads == "open_world"
        return cls(settings, model.dim, known=model.branches[0].known, clusters=clusters, open_world=open_world)

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Forget the losses of earlier epochs."""
        self.losses = torch.zeros(len(self.heads))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name."""
        coarse = torch.stack([self._swapped(head, batch) for head in self.heads])
        fine = torch.stack([self._swapped(head, batch) for head in self.finer])
        self.last_losses = coarse.detach().cpu()
        return {"clusters": coarse.mean() / 2, "finer_clusters": fine.mean() / 2}

    def remember(self, batch: Batch, *, branches: Modules[Branch], generator: torch.Generator) -> None:
        """Add the losses of this step."""
        self.losses = self.losses + self.last_losses

    @torch.no_grad()
    def after_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Serve the head with the lowest loss in this epoch."""
        best = self.heads[int(self.losses.argmin())]
        model.branches[0].linear_cluster_head.weight[-len(best.weight) :] = best.weight

    def _swapped(self, head: CosineHead, batch: Batch) -> Tensor:
        """Return the cross entropy of each view with the targets of the other."""
        logits = [self._logits(head, view[0]) for view in (batch.first, batch.second)]
        targets = [self._targets(view.detach(), batch.labels) for view in logits]
        return (F.cross_entropy(logits[0], targets[1]) + F.cross_entropy(logits[1], targets[0])) / 2

    def _logits(self, head: CosineHead, output: BranchOutput) -> Tensor:
        return torch.cat([output.known_logits[:, : self.known], head(output.embedding)], dim=1)

    def _targets(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return targets [B, C]: labels, and equally large clusters of the unlabelled images."""
        first = 0 if self.open_world else self.known
        targets = torch.zeros_like(logits)
        targets[torch.arange(len(labels), device=labels.device), labels] = 1.0
        targets[len(labels) :, first:] = balanced_assignment(
            logits[len(labels) :, first:] / CosineHead.SCALE, temperature=self.settings.target_temperature
        )
        return targets
