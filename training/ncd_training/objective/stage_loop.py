"""Training loop of the stages before discovery. Each epoch is saved, so a stopped stage resumes to the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ncd_training.base.checkpoint import load_checkpoint, save_checkpoint
from ncd_training.base.memory import kept_memory
from ncd_training.base.precision import Precision
from ncd_training.data.views import BatchPlan, batches

if TYPE_CHECKING:
    from ncd_serve.progress import Track
    from ncd_training.config.schema import OptimConfig
    from ncd_training.data.views import Views
    from ncd_training.model.branches import DualBranchModel

# Loss of inputs (images or trunk maps) and the row numbers of their images, both on the model's device.
StageLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class StageState:
    """State of a stage during training."""

    trained: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler  # stepped once per training step
    precision: Precision
    epoch: int = 0  # finished epochs

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules that a checkpoint holds beside the optimiser."""
        return {"trained": self.trained}

    def resume(self, file: Path, *, steps: int) -> None:
        """Load the last saved epoch. Learning rate and momentum follow from the number of finished steps."""
        load_checkpoint(self, file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the schedule runs ahead of the optimiser
            for _ in range(self.epoch * steps):
                self.schedule.step()


@dataclass(frozen=True)
class StageLoop:
    """Training loop for stages of a model. `folder` keeps a checkpoint of each stage's newest epoch; None: none."""

    model: DualBranchModel
    optim: OptimConfig
    workers: int
    track: Track
    folder: Path | None = None

    def plan(self, images: int, batch: int) -> BatchPlan:
        """Return batches of one view for each of the first `images` images."""
        return BatchPlan(images, 1, batch, 0, seed=self.optim.seed, views=1)

    @kept_memory()
    def run(
        self,
        name: str,
        trained: nn.Module,
        loss: StageLoss,
        *,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        views: Views,
        plan: BatchPlan,
        epochs: int,
    ) -> None:
        """Minimise a loss for `epochs` epochs, or resume and run the remaining ones."""
        file = self.folder / f"{name.replace(' ', '-')}.safetensors" if self.folder else None
        precision = Precision.on(self.model.device, mixed=self.optim.mixed_precision)
        state = StageState(trained, optimizer, schedule, precision)
        if file and file.exists():
            state.resume(file, steps=len(plan))
        shown = f"{name} (after epoch {state.epoch} of {epochs})" if state.epoch else name
        steps = self._steps(name, state, loss, views, plan, epochs=epochs, file=file)
        for _ in self.track(steps, shown, (epochs - state.epoch) * len(plan)):
            pass

    def _steps(
        self,
        name: str,
        state: StageState,
        loss: StageLoss,
        views: Views,
        plan: BatchPlan,
        *,
        epochs: int,
        file: Path | None,
    ) -> Iterator[None]:
        """Run the steps and yield after each, for the progress display."""
        device = self.model.device
        loader = batches(views, plan, workers=self.workers, device=device)
        for plan.epoch in range(state.epoch, epochs):
            for requests, (inputs,) in zip(plan, loader, strict=True):
                rows = torch.tensor([request.index for request in requests]).to(device, non_blocking=True)
                statistics = state.precision.statistics(state.trained)
                state.optimizer.zero_grad()
                with state.precision.autocast(device):
                    value = loss(self.model.placed(inputs), rows)
                state.precision.step(value, state.optimizer, statistics)
                state.schedule.step()
                yield
            state.precision.check_finite({name: float(value.detach())}, epoch=plan.epoch)
            state.epoch += 1
            if file:
                save_checkpoint(state, file)
