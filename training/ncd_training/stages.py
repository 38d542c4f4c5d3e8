"""What happens before the branches part: self-supervision by rotation, and the paper's optional supervised stage.

All train the first branch's tail; afterwards every branch starts from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

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


def train_rotations(
    model: DualBranchModel, views: FileViews, images: int, config: TrainConfig, *, track: Track
) -> None:
    """RotNet: trunk and tail learn to tell by which quarter turn an image was rotated. Uses no labels at all."""
    network = TrunkAndTail(model.trunk, model.branches[0].tail)
    lesson = Rotations(network, model.dim).to(model.trunk.mean.device).train()

    def loss(pictures: Tensor, _rows: list[int]) -> Tensor:
        return lesson(pictures).loss

    _train(model, lesson, loss, views, images, config.rotations, config, track=track, what="learning rotations")
    network.freeze()


def train_from_labels(
    model: DualBranchModel, views: FileViews, labels: Tensor, config: TrainConfig, *, track: Track
) -> None:
    """The ablation without self-supervision: trunk and tail know nothing but what the known classes teach."""
    network = TrunkAndTail(model.trunk, model.branches[0].tail)
    lesson = nn.Sequential(network, nn.Linear(model.dim, int(labels.max()) + 1)).to(model.trunk.mean.device).train()
    labels = labels.to(model.trunk.mean.device)

    def loss(pictures: Tensor, rows: list[int]) -> Tensor:
        return F.cross_entropy(lesson(pictures), labels[rows])

    _train(
        model, lesson, loss, views, len(labels), config.from_labels, config, track=track, what="learning from labels"
    )
    network.freeze()


def train_supervised(
    model: DualBranchModel, views: FileViews | CachedViews, labels: Tensor, config: TrainConfig, *, track: Track
) -> None:
    """Cross entropy on the known classes: tail and known head, on the frozen trunk."""
    branch = model.branches[0]
    labels = labels.to(model.trunk.mean.device)

    def loss(inputs: Tensor, rows: list[int]) -> Tensor:
        return F.cross_entropy(branch(model.to_maps(inputs)).known_logits[:, : branch.known], labels[rows])

    trained = nn.ModuleList([branch.tail, branch.labelled_head])
    _train(model, trained, loss, views, len(labels), config.supervised, config, track=track, what="supervised stage")
    branch.lower_novel_biases()
    for other in model.branches:
        other.labelled_head.load_state_dict(branch.labelled_head.state_dict())


def _train(
    model: DualBranchModel,
    trained: nn.Module,
    loss: Loss,
    views: FileViews | CachedViews,
    images: int,
    stage: StageConfig,
    config: TrainConfig,
    *,
    track: Track,
    what: str,
) -> None:
    """With Nesterov momentum and one cycle of the learning rate; then all branches get the first one's tail."""
    optimizer = torch.optim.SGD(
        trained.parameters(), stage.learning_rate, config.optim.momentum, weight_decay=5e-4, nesterov=True
    )
    plan = stage_plan(images, stage, config)
    schedule = OneCycleLR(optimizer, stage.learning_rate, total_steps=stage.epochs * len(plan))
    model.branches.train()
    run_stage(model, loss, views, plan, optimizer, schedule, epochs=stage.epochs, config=config, track=track, what=what)
    for branch in model.branches:
        branch.tail.load_state_dict(model.branches[0].tail.state_dict())


def stage_plan(images: int, stage: StageConfig, config: TrainConfig) -> BatchPlan:
    """One view at a time of the first `images` images."""
    return BatchPlan(images, 1, stage.batch, 0, seed=config.optim.seed, views=1)


def run_stage(
    model: DualBranchModel,
    loss: Loss,
    views: FileViews | CachedViews,
    plan: BatchPlan,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    *,
    epochs: int,
    config: TrainConfig,
    track: Track,
    what: str,
) -> None:
    """Descend a loss of inputs and their image numbers."""
    loader = batches(views, plan, workers=config.data.workers)
    for plan.epoch in track(range(epochs), what, epochs):
        for requests, (inputs,) in zip(plan, loader, strict=True):
            optimizer.zero_grad()
            value = loss(model.placed(inputs), [request.index for request in requests])
            value.backward()
            optimizer.step()
            schedule.step()
        Precision().check_finite({what: float(value.detach())}, epoch=plan.epoch)
