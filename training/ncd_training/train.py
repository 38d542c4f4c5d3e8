"""A whole run: check the images, build the model, train it, report."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import torch

from ncd_serve.files import write_json
from ncd_training import progress, report
from ncd_training.checkpoint import TrainState, load_checkpoint, save_checkpoint
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
from ncd_training.objective import Objective
from ncd_training.run_dir import RunDir
from ncd_training.setup import Setup
from ncd_training.stages import train_rotations, train_supervised
from ncd_training.trunk import TrunkParts
from ncd_training.views import BatchPlan, CachedViews, FileViews, batches, cache_bytes, cache_views
from ncd_training.weights import WeightsReport, initial_trunk

_EVALUATIONS = 10  # how often a run looks at its clusters on the way


def train(setup: Setup, run: RunDir) -> None:
    """Train from the start into a new run directory."""
    parts, origin = initial_trunk(setup.config, weights=setup.config.model.weights)
    _print_plan(setup, run, origin)
    if origin is not None:
        write_json(run.summary, {**run.read_summary(), "weights": origin.facts()})
    state = build_state(setup, parts)
    if setup.config.rotations.epochs:
        pictures = FileViews(setup.manifest.images, setup.config.data)
        train_rotations(state.model, pictures, len(setup.manifest.images), setup.config, track=setup.track)
    if setup.config.supervised.epochs:
        views = _joint_views(setup, state.model, run)
        train_supervised(state.model, views, torch.tensor(setup.labels), setup.config, track=setup.track)
    write_json(run.summary, {**run.read_summary(), "baselines": _baselines(setup, state.model)})
    save_checkpoint(state, run.checkpoint)
    _fit(setup, state, run)


def resume(setup: Setup, run: RunDir) -> None:
    """Go on with an interrupted run, to the same weights as if it had never stopped."""
    state = load_state(setup, run)
    setup.console.print(f"resuming {run.path} after epoch {state.epoch} of {setup.config.optim.epochs}", soft_wrap=True)
    _fit(setup, state, run)


def load_state(setup: Setup, run: RunDir) -> TrainState:
    """The newest state of a run, for going on, evaluation or export."""
    parts, _ = initial_trunk(setup.config, weights=None)  # all that a weight file gave is in the checkpoint
    state = build_state(setup, parts)
    load_checkpoint(state, run.checkpoint)
    return state


def evaluate(setup: Setup, state: TrainState, run: RunDir) -> dict[str, Any]:
    """Scores on every split that has true classes, also kept in the run's summary."""
    data = setup.config.data
    scores = evaluate_splits(state.model, setup.manifest, data.preprocess, workers=data.workers, track=setup.track)
    summary = {**run.read_summary(), "scores": scores}
    write_json(run.summary, summary)
    return summary


def build_state(setup: Setup, parts: TrunkParts) -> TrainState:
    """Model, memories and optimiser of a configuration, before any training."""
    config = setup.config
    known = len(setup.manifest.known_classes)
    model = DualBranchModel(parts, known=known, novel=setup.clusters, model=config.model, compat=config.compat)
    objective = Objective(
        model.dim, model=config.model, labels=config.pseudo_labels, loss=config.loss, compat=config.compat
    )
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


def _fit(setup: Setup, state: TrainState, run: RunDir) -> None:
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
    labels = torch.tensor(setup.labels)
    rows = run.read_metrics()[: state.epoch]
    epochs = config.optim.epochs
    try:
        with report.EpochDisplay(console, epochs=epochs, done=state.epoch) as display:
            while state.epoch < epochs:
                terms = train_epoch(state, loader, plan, labels, config)
                rows.append({"epoch": state.epoch, **terms, **_look(setup, state)})
                # The rows first: one beyond the checkpoint is dropped when the run goes on, a missing one is lost.
                run.write_metrics(rows)
                save_checkpoint(state, run.checkpoint)
                display.show(rows[-1])
    except (KeyboardInterrupt, SystemExit):
        console.print(f"interrupted; go on with: ncd-serve train --resume {run.path}", soft_wrap=True, highlight=False)
        raise
    if config.data.cache_dir is None:
        shutil.rmtree(run.cache, ignore_errors=True)
    report.draw_curves(run)
    evaluate(setup, state, run)


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


def _print_plan(setup: Setup, run: RunDir, origin: WeightsReport | None) -> None:
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
    if origin is not None:
        setup.console.print(origin.line, highlight=False, markup=False, soft_wrap=True)
    elif not config.rotations.epochs:
        text = "the frozen trunk has random weights: give --weights PATH, or make them with `ncd-serve pretrain`"
        setup.console.print(text, style="yellow", highlight=False, soft_wrap=True)
