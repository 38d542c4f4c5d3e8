"""State of a training run: built from a configuration, or loaded from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ncd_training.base.checkpoint import load_checkpoint
from ncd_training.base.distributed import Ranks, with_global_batch_norm
from ncd_training.base.precision import Precision, compute_device
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.onnx import configured_trunk
from ncd_training.model.weights import initial_trunk
from ncd_training.objective import build_method
from ncd_training.objective.method import Method

if TYPE_CHECKING:
    from ncd_training.config.schema import OptimConfig
    from ncd_training.data.prepare import Setup
    from ncd_training.model.trunk import TrunkParts


@dataclass
class TrainState:
    """State of training: model, method, optimiser, and the number of finished epochs."""

    model: DualBranchModel
    method: Method
    optimizer: torch.optim.Optimizer
    precision: Precision = field(default_factory=Precision)
    ranks: Ranks = field(default_factory=Ranks)
    epoch: int = 0  # finished epochs

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules that a checkpoint holds beside the optimiser."""
        return {"model": self.model, "objective": self.method}


def load_state(setup: Setup, checkpoint: Path, ranks: Ranks | None = None) -> TrainState:
    """Load the state in a checkpoint, to resume, evaluate or export."""
    parts, _ = initial_trunk(setup.config, weights=None)  # the checkpoint has everything that a weight file gave
    state = build_state(setup, parts, ranks)
    load_checkpoint(state, checkpoint)
    return state


def build_state(setup: Setup, parts: TrunkParts, ranks: Ranks | None = None) -> TrainState:
    """Build model, memories and optimiser, before any training."""
    config, ranks = setup.config, ranks or Ranks()
    model = DualBranchModel(
        parts,
        known=len(setup.manifest.known_classes),
        novel=setup.clusters,
        model=config.model,
        labels=config.pseudo_labels,
        compat=config.compat,
    )
    method = build_method(config, model, images=len(setup.manifest.unlabelled), clusters=setup.clusters)
    device = compute_device()
    model.trunk.in_onnx = configured_trunk(config)
    if ranks.size > 1:
        with_global_batch_norm(model.branches, device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    model.to(device)
    method.to(device)
    precision = Precision.on(device, mixed=config.optim.mixed_precision)
    return TrainState(model, method, build_optimizer(model, config.optim), precision, ranks)


def build_optimizer(model: DualBranchModel, optim: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser of the branches."""
    parameters = model.branches.parameters()
    if optim.optimizer == "adam":
        return torch.optim.Adam(parameters, optim.learning_rate, weight_decay=optim.weight_decay)
    return torch.optim.SGD(parameters, optim.learning_rate, optim.momentum, weight_decay=optim.weight_decay)
