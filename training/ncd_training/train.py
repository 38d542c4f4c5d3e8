"""A whole run: check the images, build the model, train it, report."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ncd_serve.errors import UsageError
from ncd_serve.files import write_json
from ncd_training import progress, report
from ncd_training.checkpoint import TrainState, load_checkpoint, save_checkpoint
from ncd_training.config import TrainConfig
from ncd_training.datasets import load_manifest
from ncd_training.dual_branch import DualBranchModel
from ncd_training.evaluate import (
    Scores,
    cluster_balance,
    cluster_scores,
    evaluate_splits,
    kmeans_ids,
    raw_pixels,
    run_model,
)
from ncd_training.loop import train_epoch
from ncd_training.manifest import Manifest
from ncd_training.objective import Objective
from ncd_training.run_dir import RunDir
from ncd_training.scan import scan
from ncd_training.supervised import train_supervised
from ncd_training.trunk import build_trunk
from ncd_training.views import BatchPlan, CachedViews, FileViews, batches, cache_bytes, cache_views

_EVALUATIONS = 10  # how often a run looks at its clusters on the way


@dataclass(frozen=True)
class Setup:
    """A configuration with its images looked at, and the place to report to."""

    config: TrainConfig
    manifest: Manifest
    console: Console

    @property
    def track(self) -> progress.Track:
        """Progress bars on the console."""
        return progress.on(self.console)

    @property
    def labels(self) -> Tensor:
        """Class numbers of the labelled images."""
        return torch.tensor([label for _, label in self.manifest.labelled])

    @property
    def clusters(self) -> int:
        """Number of novel classes, known since `prepare`."""
        assert self.config.data.novel_classes is not None
        return self.config.data.novel_classes


def prepare(config: TrainConfig, console: Console) -> Setup:
    """Find and check everything that a run needs, before any heavy work."""
    manifest = load_manifest(config.data)
    clusters = config.data.novel_classes or manifest.novel_classes
    if clusters is None:
        raise UsageError("how many novel classes are there?", hint="give --novel-classes N")
    manifest, bad = scan(manifest, track=progress.on(console))
    for path, reason in bad.items():
        console.print(f"[yellow]skipped[/yellow] {path}: {reason}", soft_wrap=True)
    manifest.check(clusters)
    data = config.data.model_copy(update={"novel_classes": clusters})
    return Setup(config.model_copy(update={"data": data}), manifest, console)


def train(config: TrainConfig, out: Path, *, console: Console) -> RunDir:
    """Train from the start into a new run directory."""
    setup = prepare(config, console)
    run = RunDir.create(out, setup.config)
    _print_plan(setup, run)
    state = build_state(setup)
    if config.supervised.epochs:
        _supervised_stage(setup, state, run)
    write_json(run.summary, {**run.read_summary(), "baselines": _baselines(setup, state.model)})
    save_checkpoint(state, run.checkpoint)
    return _fit(setup, state, run)


def resume(path: Path, *, console: Console) -> RunDir:
    """Go on with an interrupted run, to the same weights as if it had never stopped."""
    run = RunDir.open(path)
    setup = prepare(run.config(), console)
    state = build_state(setup)
    load_checkpoint(state, run.checkpoint)
    console.print(f"resuming [bold]{path}[/bold] after epoch {state.epoch} of {setup.config.optim.epochs}")
    return _fit(setup, state, run)


def load_run(path: Path, *, console: Console) -> tuple[Setup, TrainState]:
    """A trained run for evaluation or export."""
    run = RunDir.open(path)
    setup = prepare(run.config(), console)
    state = build_state(setup)
    load_checkpoint(state, run.checkpoint)
    return setup, state


def build_state(setup: Setup) -> TrainState:
    """Model, memories and optimiser of a configuration, before any training."""
    config = setup.config
    torch.manual_seed(config.optim.seed)
    kinds = config.model.branch_kinds
    parts = build_trunk(config.model.trunk, resolution=config.data.resolution)
    model = DualBranchModel(parts, branches=kinds, known=len(setup.manifest.known_classes), novel=setup.clusters)
    objective = Objective(kinds, model.dim, model=config.model, labels=config.pseudo_labels, loss=config.loss)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    model.to(device)
    objective.to(device)
    optimizer = torch.optim.SGD(
        model.branches.parameters(),
        config.optim.learning_rate,
        config.optim.momentum,
        weight_decay=config.optim.weight_decay,
    )
    return TrainState(model, objective, optimizer)


def _fit(setup: Setup, state: TrainState, run: RunDir) -> RunDir:
    config, console = setup.config, setup.console
    views = _joint_views(setup, state.model, run)
    plan = BatchPlan(
        len(setup.manifest.labelled),
        len(setup.manifest.unlabelled),
        config.optim.labelled_batch,
        config.optim.unlabelled_batch,
        seed=config.optim.seed,
    )
    loader = batches(views, plan, workers=config.data.workers)
    rows = run.read_metrics()[: state.epoch]
    epochs = config.optim.epochs
    with report.EpochDisplay(console, epochs=epochs, done=state.epoch) as display:
        while state.epoch < epochs:
            terms = train_epoch(state, loader, plan, setup.labels, config)
            row = {"epoch": state.epoch, **terms, **_look(setup, state)}
            rows.append(row)
            # The rows first: a row beyond the checkpoint is dropped when the run goes on, a missing one is lost.
            run.write_metrics(rows)
            save_checkpoint(state, run.checkpoint)
            display.show(row)
    if config.data.cache_dir is None:
        shutil.rmtree(run.cache, ignore_errors=True)
    report.draw_curves(run)
    _evaluate(setup, state, run)
    return run


def _look(setup: Setup, state: TrainState) -> dict[str, float]:
    """Balance of the clusters, and ACC where true classes are known; every so many epochs and at the end."""
    epochs = setup.config.optim.epochs
    if state.epoch % max(1, epochs // _EVALUATIONS) and state.epoch != epochs:
        return {}
    data, manifest = setup.config.data, setup.manifest
    outputs = run_model(
        state.model, manifest.unlabelled, data.preprocess, workers=0, track=progress.silent, what="looking"
    )
    figures = {"balance": cluster_balance(outputs.cluster_ids, setup.clusters)}
    if manifest.truth is not None:
        figures["acc"] = cluster_scores(outputs.cluster_ids, np.array(manifest.truth))["acc"]
    return figures


def _supervised_stage(setup: Setup, state: TrainState, run: RunDir) -> None:
    whole = setup.config.supervised.scope == "all"
    views = FileViews(setup.manifest.images, setup.config.data) if whole else _joint_views(setup, state.model, run)
    train_supervised(state.model, views, setup.labels, setup.config, track=setup.track)


def _joint_views(setup: Setup, model: DualBranchModel, run: RunDir) -> FileViews | CachedViews:
    data, images = setup.config.data, setup.manifest.images
    if not data.cache_views:
        return FileViews(images, data)
    folder = data.cache_dir or run.cache
    size = cache_bytes(model.trunk, len(images), data)
    setup.console.print(f"trunk maps of {data.cache_views} views of each image: {size / 1e6:,.0f} MB in {folder}")
    return cache_views(model.trunk, images, data, folder=folder, seed=setup.config.optim.seed, track=setup.track)


def _baselines(setup: Setup, model: DualBranchModel) -> dict[str, Scores]:
    """What k-means makes of the unlabelled images before any discovery; only where true classes are known."""
    manifest, data, seed = setup.manifest, setup.config.data, setup.config.optim.seed
    if manifest.truth is None:
        return {}
    outputs = run_model(
        model, manifest.unlabelled, data.preprocess, workers=data.workers, track=setup.track, what="initial features"
    )
    features = {
        "k-means on raw pixels": raw_pixels(manifest.unlabelled),
        "k-means on initial features": outputs.embedding,
    }
    truth = np.array(manifest.truth)
    return {name: cluster_scores(kmeans_ids(rows, setup.clusters, seed=seed), truth) for name, rows in features.items()}


def _print_plan(setup: Setup, run: RunDir) -> None:
    manifest, config = setup.manifest, setup.config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup.console.print(
        f"[bold]{manifest.name}[/bold]: {len(manifest.labelled):,} labelled images of {len(manifest.known_classes)} "
        f"known classes, {len(manifest.unlabelled):,} unlabelled images for {setup.clusters} clusters\n"
        f"{config.model.trunk} at {config.data.resolution} px on {device}, branches {config.model.branches}, "
        f"{config.optim.epochs} epochs; run directory [bold]{run.path}[/bold]",
        highlight=False,
        soft_wrap=True,
    )


def evaluate(path: Path, *, console: Console) -> dict[str, Any]:
    """Scores of a run on every split that has true classes, also kept in its summary."""
    setup, state = load_run(path, console=console)
    return _evaluate(setup, state, RunDir.open(path))


def _evaluate(setup: Setup, state: TrainState, run: RunDir) -> dict[str, Any]:
    data = setup.config.data
    scores = evaluate_splits(state.model, setup.manifest, data.preprocess, workers=data.workers, track=setup.track)
    summary = {**run.read_summary(), "scores": scores}
    write_json(run.summary, summary)
    return summary
