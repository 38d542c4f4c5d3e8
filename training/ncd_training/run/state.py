"""State of a training run: how it is built from a configuration and loaded from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ncd_training.base.checkpoint import load_checkpoint
from ncd_training.base.distributed import Ranks, with_global_batch_norm
from ncd_training.base.precision import Precision, compute_device
from ncd_training.base.run_dir import RunDir
from ncd_training.config.schema import OptimConfig
from ncd_training.data.prepare import Setup
from ncd_training.model import onnx as onnx_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.trunk import TrunkParts
from ncd_training.model.weights import initial_trunk
from ncd_training.objective import build_method
from ncd_training.objective.method import Method


@dataclass
class TrainState:
    """What changes while training."""

    model: DualBranchModel
    objective: Method
    optimizer: torch.optim.Optimizer
    precision: Precision = field(default_factory=Precision)
    ranks: Ranks = field(default_factory=Ranks)
    epoch: int = 0  # epochs done

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds beside the optimiser."""
        return {"model": self.model, "objective": self.objective}


def load_state(setup: Setup, run: RunDir, ranks: Ranks | None = None, checkpoint: Path | None = None) -> TrainState:
    """The newest state of a run, or that of another of its checkpoints, for going on, evaluation or export."""
    parts, _ = initial_trunk(setup.config, weights=None)  # all that a weight file gave is in the checkpoint
    state = build_state(setup, parts, ranks)
    load_checkpoint(state, checkpoint or run.checkpoint)
    return state


def build_state(setup: Setup, parts: TrunkParts, ranks: Ranks | None = None) -> TrainState:
    """Model, memories and optimiser of a configuration, before any training."""
    config, ranks = setup.config, ranks or Ranks()
    known = len(setup.manifest.known_classes)
    model = DualBranchModel(
        parts,
        known=known,
        novel=setup.clusters,
        model=config.model,
        labels=config.pseudo_labels,
        compat=config.compat,
    )
    objective = build_method(config, model, images=len(setup.manifest.unlabelled), clusters=setup.clusters)
    device = compute_device()
    model.trunk.in_onnx = onnx_trunk.configured(config)
    if ranks.size > 1:
        with_global_batch_norm(model.branches, device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    model.to(device)
    objective.to(device)
    precision = Precision.on(device, mixed=config.optim.mixed_precision)
    return TrainState(model, objective, _optimizer(model, config.optim), precision, ranks)


def _optimizer(model: DualBranchModel, optim: OptimConfig) -> torch.optim.Optimizer:
    parameters = model.branches.parameters()
    if optim.optimizer == "adam":
        return torch.optim.Adam(parameters, optim.learning_rate, weight_decay=optim.weight_decay)
    return torch.optim.SGD(parameters, optim.learning_rate, optim.momentum, weight_decay=optim.weight_decay)
