"""Cross entropy on the known classes before the branches part: the paper's optional stage, or a start from nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from ncd_training.views import BatchPlan, batches

if TYPE_CHECKING:
    from ncd_training.config import TrainConfig
    from ncd_training.dual_branch import DualBranchModel
    from ncd_training.progress import Track
    from ncd_training.views import CachedViews, FileViews


def train_supervised(
    model: DualBranchModel, views: FileViews | CachedViews, labels: Tensor, config: TrainConfig, *, track: Track
) -> None:
    """Train the first branch on the labelled images, then give every branch its tail and known head."""
    stage, branch = config.supervised, model.branches[0]
    trained = nn.ModuleList([branch.tail, branch.known_head])
    if stage.scope == "all":
        trained.append(model.trunk.stages)
    trained.requires_grad_(True).train()
    optimizer = torch.optim.SGD(
        trained.parameters(), stage.learning_rate, config.optim.momentum, weight_decay=5e-4, nesterov=True
    )
    plan = BatchPlan(len(labels), 1, stage.batch, 0, seed=config.optim.seed, views=1)
    schedule = OneCycleLR(optimizer, stage.learning_rate, total_steps=stage.epochs * len(plan))
    loader = batches(views, plan, workers=config.data.workers)
    for plan.epoch in track(range(stage.epochs), "supervised stage", stage.epochs):
        for requests, (images,) in zip(plan, loader, strict=True):
            rows = [request.index for request in requests]
            _step(model, images, labels[rows], optimizer)
            schedule.step()
    model.trunk.requires_grad_(False).eval()
    for other in list(model.branches)[1:]:
        other.tail.load_state_dict(branch.tail.state_dict())
        other.known_head.load_state_dict(branch.known_head.state_dict())


def _step(model: DualBranchModel, images: Tensor, labels: Tensor, optimizer: torch.optim.SGD) -> None:
    device = model.trunk.mean.device
    inputs = images.to(device).contiguous(memory_format=torch.channels_last)
    maps = inputs if images.dtype != torch.uint8 else model.trunk(inputs)
    loss = F.cross_entropy(model.branches[0](maps).known_logits, labels.to(device))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
