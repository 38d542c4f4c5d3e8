"""What happens before the branches part: self-supervision by rotation, and the paper's optional supervised stage.

All train the first branch's tail; afterwards every branch starts from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from ncd_training.checkpoint import load_checkpoint, save_checkpoint
from ncd_training.lessons import TrunkAndTail
from ncd_training.precision import Precision
from ncd_training.rotations import Rotations
from ncd_training.views import BatchPlan, batches

if TYPE_CHECKING:
    from ncd_training.config import StageConfig, TrainConfig
    from ncd_training.dual_branch import DualBranchModel
    from ncd_training.progress import Track
    from ncd_training.views import CachedViews, FileViews

# Of inputs (images or trunk maps) and the numbers of their images.
Loss = Callable[[Tensor, list[int]], Tensor]


@dataclass
class StageState:
    """What changes while a stage is trained."""

    trained: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler  # of steps
    precision: Precision = field(default_factory=Precision)
    epoch: int = 0  # epochs done

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds beside the optimiser."""
        return {"trained": self.trained}

    def go_on(self, kept: Path, *, steps: int) -> None:
        """Load what an earlier process has kept; learning rate and momentum follow from the steps that it made."""
        load_checkpoint(self, kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the schedule runs ahead of the optimiser
            for _ in range(self.epoch * steps):
                self.schedule.step()


@dataclass(frozen=True)
class Stages:
    """Trains a model's stages, one after another. Every epoch is `kept` in a folder, if one is given, to go on from."""

    model: DualBranchModel
    config: TrainConfig
    track: Track
    kept: Path | None = None

    def rotations(self, views: FileViews, images: int) -> None:
        """RotNet: trunk and tail learn to tell by which quarter turn an image was rotated. Uses no labels at all."""
        network = TrunkAndTail(self.model.trunk, self.model.branches[0].tail)
        lesson = Rotations(network, self.model.dim).to(self._device).train()

        def loss(pictures: Tensor, _rows: list[int]) -> Tensor:
            return lesson(pictures).loss

        self._teach_tails("learning rotations", lesson, loss, views, images, self.config.rotations)
        network.freeze()

    def from_labels(self, views: FileViews, labels: Tensor) -> None:
        """The ablation without self-supervision: trunk and tail know nothing but what the known classes teach."""
        network = TrunkAndTail(self.model.trunk, self.model.branches[0].tail)
        lesson = nn.Sequential(network, nn.Linear(self.model.dim, int(labels.max()) + 1)).to(self._device).train()
        targets = labels.to(self._device)

        def loss(pictures: Tensor, rows: list[int]) -> Tensor:
            return F.cross_entropy(lesson(pictures), targets[rows])

        self._teach_tails("learning from labels", lesson, loss, views, len(labels), self.config.from_labels)
        network.freeze()

    def supervised(self, views: FileViews | CachedViews, labels: Tensor) -> None:
        """Cross entropy on the known classes: tail and known head, on the frozen trunk."""
        branch, targets = self.model.branches[0], labels.to(self._device)

        def loss(inputs: Tensor, rows: list[int]) -> Tensor:
            logits = branch(self.model.to_maps(inputs)).known_logits[:, : branch.known]
            return F.cross_entropy(logits, targets[rows])

        trained = nn.ModuleList([branch.tail, branch.labelled_head])
        self._teach_tails("supervised stage", trained, loss, views, len(labels), self.config.supervised)
        branch.lower_novel_biases()
        for other in self.model.branches:
            other.labelled_head.load_state_dict(branch.labelled_head.state_dict())

    def _teach_tails(
        self,
        what: str,
        trained: nn.Module,
        loss: Loss,
        views: FileViews | CachedViews,
        images: int,
        stage: StageConfig,
    ) -> None:
        """With Nesterov momentum and one cycle of the learning rate; then all branches get the first one's tail."""
        optimizer = torch.optim.SGD(
            trained.parameters(), stage.learning_rate, self.config.optim.momentum, weight_decay=5e-4, nesterov=True
        )
        plan = self.plan(images, stage)
        schedule = OneCycleLR(optimizer, stage.learning_rate, total_steps=stage.epochs * len(plan))
        self.model.branches.train()
        self.run(what, StageState(trained, optimizer, schedule), loss, views, plan, epochs=stage.epochs)
        for branch in self.model.branches:
            branch.tail.load_state_dict(self.model.branches[0].tail.state_dict())

    def plan(self, images: int, stage: StageConfig) -> BatchPlan:
        """One view at a time of the first `images` images."""
        return BatchPlan(images, 1, stage.batch, 0, seed=self.config.optim.seed, views=1)

    def run(
        self,
        what: str,
        state: StageState,
        loss: Loss,
        views: FileViews | CachedViews,
        plan: BatchPlan,
        *,
        epochs: int,
    ) -> None:
        """Descend a loss of inputs and their image numbers."""
        kept = self.kept / f"{what.replace(' ', '-')}.safetensors" if self.kept else None
        if kept and kept.exists():
            state.go_on(kept, steps=len(plan))
        loader = batches(views, plan, workers=self.config.data.workers)
        doing = f"{what} (after epoch {state.epoch} of {epochs})" if state.epoch else what
        for plan.epoch in self.track(range(state.epoch, epochs), doing, epochs - state.epoch):
            for requests, (inputs,) in zip(plan, loader, strict=True):
                state.optimizer.zero_grad()
                value = loss(self.model.placed(inputs), [request.index for request in requests])
                value.backward()
                state.optimizer.step()
                state.schedule.step()
            state.precision.check_finite({what: float(value.detach())}, epoch=plan.epoch)
            state.epoch += 1
            if kept:
                save_checkpoint(state, kept)

    @property
    def _device(self) -> torch.device:
        return self.model.trunk.mean.device
