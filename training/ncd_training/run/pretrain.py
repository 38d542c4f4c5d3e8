"""Self-supervised pretraining of trunk and tail by RotNet or MoCo v2: `ncd-serve pretrain`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ncd_serve.progress import Progress
from ncd_training.base.checkpoint import load_checkpoint, save_checkpoint
from ncd_training.base.precision import Precision, compute_device
from ncd_training.base.randomness import Purpose
from ncd_training.base.run_dir import PRETRAINED, RunDir
from ncd_training.config.schema import PretrainConfig, TrainConfig
from ncd_training.data.prepare import Setup
from ncd_training.data.views import BatchPlan, FileViews, batches
from ncd_training.model.branches import Trunk
from ncd_training.model.predict import EvalImages
from ncd_training.model.trunk import TrunkParts
from ncd_training.model.weights import WeightsReport, initial_trunk, save_weights
from ncd_training.pretext import MomentumContrast, Rotations, TrunkAndTail
from ncd_training.run.plan import device_name
from ncd_training.summary.live import EpochDisplay, RunLog
from ncd_training.summary.plots import CurvePlots, draw_curves

_MAX_HELD_OUT_IMAGES = 2000
_SELECTION_METRIC = "held_out_accuracy"


@dataclass
class PretrainState:
    """State of pretraining. The modules of `parts` are those that the task trains."""

    parts: TrunkParts
    task: Rotations | MomentumContrast
    optimizer: torch.optim.Optimizer
    precision: Precision
    epoch: int = 0  # epochs done

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Modules that a checkpoint holds beside the optimiser."""
        return {"lesson": self.task}  # the key that checkpoints have always had


def pretrain(setup: Setup, run: RunDir, *, progress: Progress) -> None:
    """Pretrain into a run directory. Where there is a checkpoint, resume to the same weights as without the stop."""
    config, begun = setup.config, run.checkpoint.exists()
    with run.writing(), RunLog(run.log, progress.console) as log:
        # The checkpoint has everything that a weight file gave.
        parts, origin = initial_trunk(config, weights=None if begun else config.model.weights_file)
        state = build_state(config, parts)
        if begun:
            load_checkpoint(state, run.checkpoint)
            progress.say(f"resuming {run.path} after epoch {state.epoch} of {config.pretrain.epochs}")
        else:
            _print_plan(setup, run, origin, progress)
            setup.keep(run)
            run.note_start(device=device_name(), weights=origin.facts() if origin else None)
            save_checkpoint(state, run.checkpoint)
        _fit(setup, state, run, log, progress)


def build_state(config: TrainConfig, parts: TrunkParts) -> PretrainState:
    """Build the pretext task of a configuration and its optimiser, before any training."""
    settings = config.pretrain
    network = TrunkAndTail(Trunk(parts), parts.tail)
    task = (
        Rotations(network, parts.dim) if settings.method == "rotnet" else MomentumContrast(network, parts.dim, settings)
    )
    device = compute_device()
    task.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    task.to(device)
    optimizer = torch.optim.SGD(
        [parameter for parameter in task.parameters() if parameter.requires_grad],
        settings.learning_rate,
        settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )
    return PretrainState(parts, task, optimizer, Precision.on(device, mixed=config.optim.mixed_precision))


def split_images(images: Sequence[Path], settings: PretrainConfig, *, seed: int) -> tuple[list[Path], list[Path]]:
    """Return images to learn from and, for RotNet, held-out images that select the best epoch."""
    if settings.method != "rotnet":
        return list(images), []
    number = max(1, min(_MAX_HELD_OUT_IMAGES, round(settings.held_out * len(images))))
    chosen = set(np.random.default_rng([seed, Purpose.HELD_OUT]).permutation(len(images))[:number].tolist())
    learn = [path for index, path in enumerate(images) if index not in chosen]
    return learn, [images[index] for index in sorted(chosen)]


def train_epoch(
    state: PretrainState, loader: Iterable[list[Tensor]], plan: BatchPlan, settings: PretrainConfig
) -> dict[str, float]:
    """Run the epoch `state.epoch`, count it as done, and return the mean loss and accuracy."""
    plan.epoch = state.epoch
    for group in state.optimizer.param_groups:
        group["lr"] = pretraining_rate(settings, state.epoch)
    device = _device(state)
    state.task.train()
    totals = torch.zeros(2)
    for views in loader:
        statistics = state.precision.statistics(state.task)
        state.optimizer.zero_grad()
        with state.precision.autocast(device):
            result = state.task(*(view.to(device, non_blocking=True) for view in views))
        state.precision.step(result.loss, state.optimizer, statistics)
        totals += torch.stack([result.loss.detach(), result.accuracy]).cpu()
        state.precision.check_finite({"loss": float(totals[0])}, epoch=state.epoch)
    state.epoch += 1
    loss, accuracy = (totals / len(plan)).tolist()
    return {"loss": loss, "accuracy": accuracy}


@torch.no_grad()
def held_out_accuracy(state: PretrainState, paths: Sequence[Path], config: TrainConfig) -> float:
    """Share of right answers on images that the network never learned from."""
    state.task.eval()
    loader = DataLoader(EvalImages(paths, config.data.preprocess), batch_size=64, num_workers=config.data.workers)
    right = sum(float(state.task(images.to(_device(state))).accuracy) * len(images) for images in loader)
    return right / len(paths)


def _fit(setup: Setup, state: PretrainState, run: RunDir, log: RunLog, progress: Progress) -> None:
    config, settings, seed = setup.config, setup.config.pretrain, setup.config.optim.seed
    learn, held_out = split_images(setup.manifest.images, settings, seed=seed)
    plan = BatchPlan(len(learn), 1, settings.batch, 0, seed=seed, views=state.task.views)
    loader = batches(FileViews(learn, config.data), plan, workers=config.data.workers, device=_device(state))
    rows, curves = run.read_metrics()[: state.epoch], CurvePlots(run.plots)
    display = EpochDisplay(progress, log, epochs=settings.epochs, steps=len(plan), rows=rows)
    try:
        with display:
            while state.epoch < settings.epochs:
                row = {"epoch": state.epoch + 1, **train_epoch(state, display.steps(loader), plan, settings)}
                if held_out:
                    row[_SELECTION_METRIC] = held_out_accuracy(state, held_out, config)
                # Rows and weights come before the checkpoint: a resumed run makes those beyond it again.
                run.write_metrics([*rows, row])
                if all(row.get(_SELECTION_METRIC, 0) > earlier.get(_SELECTION_METRIC, -1) for earlier in rows):
                    _save_weights(state, run, config)
                save_checkpoint(state, run.checkpoint)
                rows.append(row)
                curves.follow(rows)
                display.show(row)
    except (KeyboardInterrupt, SystemExit):
        progress.say(f"interrupted; resume with: ncd-serve pretrain --resume {run.path}")
        raise
    draw_curves(rows, run.plots)


def _save_weights(state: PretrainState, run: RunDir, config: TrainConfig) -> None:
    facts = {"method": config.pretrain.method, "trunk": config.model.backbone, "epoch": str(state.epoch)}
    save_weights(state.parts, run.path / PRETRAINED, trunk=state.task.network.trunk, facts=facts)


def _device(state: PretrainState) -> torch.device:
    return state.task.network.trunk.mean.device


def _print_plan(setup: Setup, run: RunDir, origin: WeightsReport | None, progress: Progress) -> None:
    config, settings = setup.config, setup.config.pretrain
    learn, held_out = split_images(setup.manifest.images, settings, seed=config.optim.seed)
    beside = f"{len(held_out):,} held out" if held_out else f"queue of {settings.queue:,} keys"
    progress.say(f"{setup.manifest.name}: {len(learn):,} images, no labels, {beside}")
    progress.say(
        f"{settings.method} of {config.model.backbone} at {config.data.resolution} px on {device_name()}, "
        f"{settings.epochs} epochs in batches of {settings.batch}; run directory {run.path}"
    )
    for note in setup.manifest.notes:
        progress.say(f"note: {note}", style="yellow")
    if origin is not None:
        progress.say(origin.line)


def pretraining_rate(pretrain: PretrainConfig, epoch: int) -> float:
    """Return the learning rate of pretraining: steps at milestones (RotNet), or half a cosine down to 0 (MoCo v2)."""
    done = epoch / pretrain.epochs
    if pretrain.schedule == "cosine":
        return pretrain.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return pretrain.learning_rate * pretrain.decay ** sum(done >= milestone for milestone in pretrain.milestones)
