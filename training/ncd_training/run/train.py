"""A whole run: check the images, build the model, train it, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from ncd_serve.files import write_json
from ncd_training.base.checkpoint import save_checkpoint
from ncd_training.base.distributed import Ranks, join, leave
from ncd_training.base.run_dir import RunDir
from ncd_training.data.prepare import Setup
from ncd_training.data.views import BatchPlan, FileViews, Views, batches
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.map_cache import cache_bytes, cache_views
from ncd_training.model.weights import initial_trunk
from ncd_training.objective.method import Material
from ncd_training.run import monitor as watch
from ncd_training.run.plan import device_name, measure, print_cost, print_plan
from ncd_training.run.stages import Stages
from ncd_training.run.state import TrainState, build_state, load_state
from ncd_training.run.step import train_epoch
from ncd_training.score.reference import to_reference
from ncd_training.summary.live import EpochDisplay, RunLog
from ncd_training.summary.page import write_report
from ncd_training.summary.plots import CurvePlots, draw_curves


def train(setup: Setup, run: RunDir) -> None:
    """Train into a run directory; where there is a checkpoint, go on to the same weights as if it had never stopped."""
    with _logged(setup, run) as (setup, ranks, log):
        begun = ranks.leaders(run.checkpoint.exists())
        run.check_images(setup.manifest)
        if not begun:
            _start(setup, run, ranks)
        state = load_state(setup, run, ranks)
        if begun:
            text = f"resuming {run.path} after epoch {state.epoch} of {setup.config.optim.epochs}"
            setup.console.print(text, soft_wrap=True)
        _fit(setup, state, run, log)


def dry_run(setup: Setup) -> None:
    """Everything up to the first real steps, and what the run would cost; leaves nothing behind."""
    parts, origin = initial_trunk(setup.config, weights=setup.config.model.weights)
    plan = _batch_plan(setup)
    print_plan(setup, steps=len(plan), origin=origin, folder=None)
    if setup.config.optim.epochs:
        print_cost(setup, measure(build_state(setup, parts), setup, plan, patience=math.inf), steps=len(plan))


@contextmanager
def _logged(setup: Setup, run: RunDir) -> Iterator[tuple[Setup, Ranks, RunLog]]:
    """The processes that train together; the first one talks, and what it says is logged."""
    ranks = join()
    if ranks.leads:
        run.drop_unfinished()
    else:
        setup = replace(setup, console=Console(quiet=True))
    with run.writing(), RunLog(run.log if ranks.leads else None, setup.console) as log:
        ranks.agree(f"{setup.config.to_toml()} {setup.manifest}")
        try:
            yield setup, ranks, log
        except (KeyboardInterrupt, SystemExit):
            text = f"interrupted; go on with: ncd-serve train --resume {run.path}"
            setup.console.print(text, soft_wrap=True, highlight=False)
            raise
        ranks.wait()  # the first one evaluates; torchrun would not let it end long after the others
    leave()


def _start(setup: Setup, run: RunDir, ranks: Ranks) -> None:
    """All that comes before the branches part; ends in the checkpoint from which every rank starts."""
    if ranks.leads:
        state = _teach_trunk(setup, run, processes=ranks.size)
    else:
        state = build_state(setup, initial_trunk(setup.config, weights=None)[0])
    ranks.follow_leader(state.model.trunk)
    material = gather(setup, state.model, run, ranks)
    if ranks.leads:
        _teach_branches(setup, state, run, material)
    ranks.wait()


def _teach_trunk(setup: Setup, run: RunDir, *, processes: int) -> TrainState:
    """The plan, and what comes before the trunk is frozen."""
    config, plan = setup.config, _batch_plan(setup)
    parts, origin = initial_trunk(config, weights=config.model.weights)
    print_plan(setup, steps=len(plan), origin=origin, folder=run.path)
    facts = origin.facts() if origin else None
    run.note_start(setup.findings.lines(), facts, images=setup.manifest, device=device_name())
    state = build_state(setup, parts)
    if config.optim.epochs:
        print_cost(setup, measure(state, setup, plan, processes=processes), steps=len(plan))
    stages = _stages(setup, state, run)
    if config.rotations.epochs:
        pictures = FileViews(setup.manifest.images, config.data)
        stages.rotations(pictures, len(setup.manifest.images))
    if config.from_labels.epochs:
        pictures = FileViews(setup.manifest.images, config.data)
        stages.from_labels(pictures, torch.tensor(setup.labels))
    return state


def _teach_branches(setup: Setup, state: TrainState, run: RunDir, material: Material) -> None:
    """What comes on the frozen trunk, and a first look at it."""
    if setup.config.supervised.epochs:
        _stages(setup, state, run).supervised(material.views, material.labels)
    state.objective.before_training(state, material)
    write_json(run.summary, {**run.read_summary(), "baselines": watch.first_look(setup, state, run)})
    save_checkpoint(state, run.initial)
    save_checkpoint(state, run.checkpoint)
    run.drop_stages()


def _stages(setup: Setup, state: TrainState, run: RunDir) -> Stages:
    return Stages(state.model, setup.config, setup.track, run.stages)


def evaluate(setup: Setup, state: TrainState, run: RunDir) -> dict[str, Any]:
    """Scores on every split that has true classes, kept in the run's summary; what was found is kept beside it."""
    scores, outputs = watch.last_look(setup, state)
    to_reference(setup, outputs, checkpoint=run.checkpoint).write(run.reference)
    summary = {**run.read_summary(), "method": setup.config.method.name, **scores}
    write_json(run.summary, summary)
    write_report(setup, run, epoch=state.epoch, scored=True)
    return summary


def _fit(setup: Setup, state: TrainState, run: RunDir, log: RunLog) -> None:
    config, ranks, plan = setup.config, state.ranks, _batch_plan(setup)
    material = gather(setup, state.model, run, ranks)
    loader = batches(material.views, plan, workers=config.data.workers, device=state.model.device, ranks=ranks)
    if config.optim.compile:
        state.model.compile()
    rows, curves = run.read_metrics()[: state.epoch], CurvePlots(run.plots)
    epochs = config.optim.epochs
    display = EpochDisplay(setup.console, log, epochs=epochs, steps=len(plan), rows=rows)
    try:
        with _board(setup, state, run) as board, display:
            while state.epoch < epochs:
                display.say("preparing")
                state.objective.before_epoch(state, material)
                ranks.follow_leader(state.model.branches, state.objective)
                terms = train_epoch(state, display.steps(loader), plan, material.labels, config)
                if not ranks.leads:
                    continue
                display.say("looking at the clusters")
                rows.append({"epoch": state.epoch, **terms, **watch.look(setup, state, run)})
                # The rows first: one beyond the checkpoint is dropped when the run goes on, a missing one is lost.
                run.write_metrics(rows)
                save_checkpoint(state, run.checkpoint)
                curves.follow(rows)
                board(rows[-1])
                display.show(rows[-1])
    except (KeyboardInterrupt, SystemExit):
        if ranks.leads:
            write_report(setup, run, epoch=state.epoch, scored=False)
        raise
    if not ranks.leads:
        return
    run.drop_cache()
    draw_curves(rows, run.plots)
    evaluate(setup, state, run)


def _batch_plan(setup: Setup) -> BatchPlan:
    optim, manifest = setup.config.optim, setup.manifest
    sizes = optim.labelled_batch, optim.unlabelled_batch
    return BatchPlan(len(manifest.labelled), len(manifest.unlabelled), *sizes, seed=optim.seed)


def _board(
    setup: Setup, state: TrainState, run: RunDir
) -> AbstractContextManager[Callable[[Mapping[str, Any]], object]]:
    """Where epochs are written for TensorBoard, if at all."""
    if not (setup.config.report.tensorboard and state.ranks.leads):
        return nullcontext(lambda row: None)
    from ncd_training.summary.live import tensorboard  # an optional extra

    return tensorboard(run.path / "tensorboard", epochs_done=state.epoch)


def gather(setup: Setup, model: DualBranchModel, run: RunDir, ranks: Ranks | None = None) -> Material:
    """What a method may look at; views are cached here if they are to be."""
    views = _views(setup, model, run, ranks)
    labels = torch.tensor(setup.labels)
    return Material(views, labels, setup.manifest.unlabelled, setup.config, setup.track, run.stages)


def _views(setup: Setup, model: DualBranchModel, run: RunDir, ranks: Ranks | None) -> Views:
    data, images = setup.config.data, setup.manifest.images
    if not data.cache_views:
        return FileViews(images, data)
    folder = data.cache_dir or run.cache
    size = cache_bytes(model.trunk, len(images), data)
    setup.console.print(f"trunk maps of {data.cache_views} views of each image: {size / 1e6:,.0f} MB in {folder}")
    return cache_views(model.trunk, images, data, folder=folder, track=setup.track, ranks=ranks)
