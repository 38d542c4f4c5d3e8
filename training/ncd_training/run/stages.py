"""Stages before discovery: self-supervision by rotation, training from labels, the paper's supervised stage.

Each one trains the first branch's tail; afterwards all branches start from a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from ncd_training.objective.stage_loop import StageLoop
from ncd_training.pretext import Rotations, TrunkAndTail

if TYPE_CHECKING:
    from ncd_serve.progress import Track
    from ncd_training.config.schema import StageConfig, TrainConfig
    from ncd_training.data.views import Views
    from ncd_training.model.branches import DualBranchModel
    from ncd_training.objective.stage_loop import StageLoss


@dataclass(frozen=True)
class Stages:
    """Stages that train a model before discovery. With a `folder`, a stage resumes after its last finished epoch."""

    model: DualBranchModel
    config: TrainConfig
    track: Track
    folder: Path | None = None

    def rotations(self, views: Views, images: int) -> None:
        """Train trunk and tail to predict by how many quarter turns an image was rotated (RotNet). Uses no labels."""
        network = TrunkAndTail(self.model.trunk, self.model.branches[0].tail)
        task = Rotations(network, self.model.dim).to(self.model.device).train()

        def loss(pictures: Tensor, _rows: Tensor) -> Tensor:
            return task(pictures).loss

        self._train_tails("learning rotations", task, loss, views, images, self.config.rotations)
        network.freeze()

    def from_labels(self, views: Views, labels: Tensor) -> None:
        """Train trunk and tail on the known classes only (ablation without self-supervision)."""
        network = TrunkAndTail(self.model.trunk, self.model.branches[0].tail)
        classes = int(labels.max()) + 1
        task = nn.Sequential(network, nn.Linear(self.model.dim, classes)).to(self.model.device).train()
        targets = labels.to(self.model.device)

        def loss(pictures: Tensor, rows: Tensor) -> Tensor:
            return F.cross_entropy(task(pictures), targets[rows])

        self._train_tails("learning from labels", task, loss, views, len(labels), self.config.from_labels)
        network.freeze()

    def supervised(self, views: Views, labels: Tensor) -> None:
        """Train tail and known head on the frozen trunk, with cross entropy on the known classes."""
        branch, targets = self.model.branches[0], labels.to(self.model.device)

        def loss(inputs: Tensor, rows: Tensor) -> Tensor:
            logits = branch(self.model.to_maps(inputs)).known_logits[:, : branch.known]
            return F.cross_entropy(logits, targets[rows])

        trained = nn.ModuleList([branch.tail, branch.labelled_head])
        self._train_tails("supervised stage", trained, loss, views, len(labels), self.config.supervised)
        branch.lower_novel_biases()
        for other in self.model.branches:
            other.labelled_head.load_state_dict(branch.labelled_head.state_dict())

    def _train_tails(
        self, name: str, trained: nn.Module, loss: StageLoss, views: Views, images: int, stage: StageConfig
    ) -> None:
        """Train with Nesterov momentum and one cycle of the learning rate, then copy the tail to all branches."""
        optim = self.config.optim
        optimizer = torch.optim.SGD(
            trained.parameters(), stage.learning_rate, optim.momentum, weight_decay=5e-4, nesterov=True
        )
        loop = StageLoop(self.model, optim, self.config.data.workers, self.track, self.folder)
        plan = loop.plan(images, stage.batch)
        schedule = OneCycleLR(optimizer, stage.learning_rate, total_steps=stage.epochs * len(plan))
        self.model.branches.train()
        loop.run(
            name,
            trained,
            loss,
            optimizer=optimizer,
            schedule=schedule,
            views=views,
            plan=plan,
            epochs=stage.epochs,
        )
        for branch in self.model.branches:
            branch.tail.load_state_dict(self.model.branches[0].tail.state_dict())
