"""State of a training run, built from a configuration or loaded from a checkpoint; one epoch, one step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ncd_training.base.checkpoint import load_checkpoint
from ncd_training.base.distributed import Ranks, with_global_batch_norm
from ncd_training.base.memory import kept_memory
from ncd_training.base.precision import Precision, compute_device
from ncd_training.base.randomness import Purpose, generator_for
from ncd_training.model.branches import BranchOutput, DualBranchModel
from ncd_training.model.folding import fold_norms
from ncd_training.model.onnx import configured_trunk
from ncd_training.model.weights import initial_trunk
from ncd_training.objective.losses import ramp_up
from ncd_training.objective.method import Batch, Method, build_method

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ncd_training.config.schema import OptimConfig, TrainConfig
    from ncd_training.data.prepare import Setup
    from ncd_training.data.views import BatchPlan
    from ncd_training.model.trunk import TrunkParts


_LAST_SHARE = 1e-3  # of the learning rate, at the end of a cosine


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
    elif device.type == "cpu":
        for branch in model.branches:
            fold_norms(branch.tail)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    model.to(device)
    method.to(device)
    precision = Precision.on(device, mixed=config.optim.mixed_precision)
    return TrainState(model, method, build_optimizer(model, method, config.optim), precision, ranks)


def build_optimizer(model: DualBranchModel, method: Method, optim: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser of the branches, and of what the method trains beside them."""
    own = (parameter for parameter in method.parameters() if parameter.requires_grad)
    parameters = [*model.branches.parameters(), *own]
    if optim.optimizer == "adam":
        return torch.optim.Adam(parameters, optim.learning_rate, weight_decay=optim.weight_decay)
    return torch.optim.SGD(parameters, optim.learning_rate, optim.momentum, weight_decay=optim.weight_decay)


@kept_memory()
def train_epoch(
    state: TrainState, loader: Iterable[list[Tensor]], plan: BatchPlan, labels: Tensor, config: TrainConfig
) -> dict[str, float]:
    """Run the epoch `state.epoch`, increment it, and return the mean of each loss term."""
    plan.epoch, labelled = state.epoch, config.optim.labelled_batch
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(config.optim, state.epoch)
    ramp = ramp_up(config.loss, state.epoch)
    state.model.train()
    totals: dict[str, float] = {}
    # The plan is a function of the epoch: iterated beside its loader, it gives the images of each batch.
    for step, (requests, views) in enumerate(zip(plan, loader, strict=True)):
        indices = [request.index for request in requests]
        unlabelled = torch.tensor(indices[labelled:]) - len(labels)
        generator = generator_for(config.optim.seed, Purpose.PARTS, state.epoch, step)
        terms = train_step(state, views, labels[indices[:labelled]], rows=unlabelled, ramp=ramp, generator=generator)
        # The only synchronisation with the device in a step; with float16, torch's GradScaler synchronises as well.
        figures = dict(zip(terms, torch.stack([*terms.values()]).tolist(), strict=True))
        state.precision.check_finite(figures, epoch=state.epoch)
        for name, value in figures.items():
            totals[name] = totals.get(name, 0.0) + value / len(plan)
    state.epoch += 1
    return totals


def train_step(
    state: TrainState,
    views: list[Tensor],
    labels: Tensor,
    *,
    rows: Tensor,
    ramp: float,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Update the branches once from two views of a batch, labelled images first, then the unlabelled `rows`.

    Returns the loss terms as tensors on the model's device: reading them would synchronise.
    """
    model, method, ranks, precision = state.model, state.method, state.ranks, state.precision
    labels, rows, *views = (tensor.to(model.device, non_blocking=True) for tensor in (labels, rows, *views))
    state.optimizer.zero_grad()  # before the forward pass, so that old gradients are not held beside its maps
    statistics = precision.statistics(model)
    with precision.autocast(model.device):
        outputs = model(model.to_maps(model.placed(torch.cat(views))))
    first, second = map(ranks.gather, split_views(outputs))
    batch = Batch(first, second, labels, rows, ramp)
    terms = method(batch)
    precision.backward(torch.stack(list(terms.values())).sum())
    # The method sees the whole batch on every rank, so gradients of its own parameters are complete.
    ranks.add_gradients(model.branches.parameters())
    if precision.update(state.optimizer, statistics):  # features of a skipped step may be infinite
        method.remember(batch, branches=model.branches, generator=generator)
    return {name: term.detach() for name, term in terms.items()}


def split_views(outputs: list[BranchOutput]) -> tuple[list[BranchOutput], list[BranchOutput]]:
    """Split the outputs of a batch that holds both views into those of each view, in float32.

    Pseudo labels use the parts of the first view only: these carry no gradient, and those of the second are dropped.
    """
    halves = [[tensor.float().chunk(2) for tensor in output] for output in outputs]
    first, second = ([BranchOutput(*(pair[view] for pair in output)) for output in halves] for view in (0, 1))
    return (
        [output._replace(parts=output.parts.detach()) for output in first],
        [output._replace(parts=output.parts[..., :0, :0]) for output in second],
    )


def learning_rate(optim: OptimConfig, epoch: int) -> float:
    """Return the learning rate: with step decay after each milestone, or along half a cosine to a thousandth."""
    if optim.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * epoch / optim.epochs))
        return optim.learning_rate * (_LAST_SHARE + (1.0 - _LAST_SHARE) * share)
    return optim.learning_rate * optim.decay ** sum(epoch >= milestone for milestone in optim.milestones)
