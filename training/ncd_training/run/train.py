"""Training run from start to end: build the model, run the stages before discovery, train, evaluate, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from ncd_serve.progress import Progress
from ncd_training.base.checkpoint import save_checkpoint
from ncd_training.base.distributed import Ranks, join, leave
from ncd_training.base.run_dir import ALONE, RunDir
from ncd_training.data.prepare import check_processes, images_changed, prepare
from ncd_training.data.scan import load_manifest_of_run, typical_side
from ncd_training.data.views import BatchPlan, FileViews, Views, batches
from ncd_training.model.map_cache import cache_views
from ncd_training.model.weights import initial_trunk, settle
from ncd_training.objective.method import Material, checked
from ncd_training.pretext import Stages
from ncd_training.run.ids import keep_ids
from ncd_training.run.monitor import Monitor
from ncd_training.run.plan import announce_cost, device_name, expected_cost, measure_step, plan_lines
from ncd_training.run.step import TrainState, build_state, load_state, train_epoch
from ncd_training.score.reference import embed_labelled, to_reference
from ncd_training.score.verdict import judge
from ncd_training.summary.live import EpochDisplay, RunLog, tensorboard
from ncd_training.summary.page import write_report
from ncd_training.summary.plots import CurvePlots, draw_curves

if TYPE_CHECKING:
    from ncd_training.base.processes import Launch
    from ncd_training.base.run_dir import Summary
    from ncd_training.config.schema import OptimConfig
    from ncd_training.data.manifest import Manifest
    from ncd_training.data.prepare import Setup
    from ncd_training.model.branches import Trunk


def set_up(listed: Setup, *, progress: Progress, launch: Launch = ALONE) -> Setup:
    """Check settings, weights and images of a new run, quick checks first, and return its setup."""
    config = listed.config
    check_processes(config.optim, launch.size)
    ranks = join(launch)
    shown = progress if ranks.is_leader else Progress(Console(quiet=True))
    images = listed.manifest.images
    config = settle(checked(config), images=len(images), progress=shown, side=typical_side(images))
    return prepare(
        replace(listed, config=config),
        progress=shown,
        mapper=lambda look, paths: ranks.map(look, paths, track=shown.track, what="checking images"),
    )


def train(setup: Setup, run: RunDir, *, progress: Progress, launch: Launch = ALONE) -> None:
    """Train into a run directory. Where there is a checkpoint, resume to the same weights as without the stop."""
    with _logged(setup, run, progress, launch) as (progress, ranks, log):
        _keep_images(setup, run, ranks)
        begun = ranks.leaders(run.checkpoint.exists())
        if not begun:
            _start(setup, run, ranks, progress)
        state = load_state(setup, run.checkpoint, ranks)
        if begun:
            progress.say(f"resuming {run.path} after epoch {state.epoch} of {setup.config.optim.epochs}")
        _fit(setup, state, run, log, progress)


def dry_run(setup: Setup, *, progress: Progress) -> None:
    """Run everything up to the first training steps, and print the expected time and memory. Writes no files."""
    parts, origin = initial_trunk(setup.config, weights=setup.config.model.weights_file)
    plan = batch_plan(setup.config.optim, setup.manifest)
    for text, style in plan_lines(setup, steps=len(plan), origin=origin, folder=None):
        progress.say(text, style=style)
    if setup.config.optim.epochs:
        cost = measure_step(build_state(setup, parts), setup, plan, slow=math.inf)
        progress.say(expected_cost(setup.config, cost, setup.manifest, steps=len(plan)).line)


def evaluate(setup: Setup, state: TrainState, run: RunDir, *, progress: Progress) -> Summary:
    """Score every split that has true classes, judge the clusters without them; write both and the model's outputs."""
    monitor = Monitor(setup, run.plots, progress)
    summary, outputs = monitor.at_the_end(state, run.read_summary())
    open_world = setup.config.model.heads == "open_world"
    data, track = setup.config.data, progress.track
    labelled = embed_labelled(state.model, setup.manifest, data.preprocess, workers=data.workers, track=track)
    reference = to_reference(
        outputs, labelled, setup.manifest, checkpoint=run.checkpoint, clusters_are_classes=open_world
    )
    reference.write(run.reference)
    verdict = judge(
        outputs,
        labelled,
        known_clusters=len(setup.manifest.known_classes) if open_world else 0,
        taught=setup.config.from_labels.epochs > 0,
        seed=setup.config.optim.seed,
    )
    summary = summary.model_copy(update={"verdict": verdict})
    run.write_summary(summary)
    write_report(setup, run, epoch=state.epoch, scored=True)
    return summary


def batch_plan(optim: OptimConfig, manifest: Manifest) -> BatchPlan:
    """Return the batch plan of a run."""
    sizes = optim.labelled_batch, optim.unlabelled_batch
    return BatchPlan(len(manifest.labelled), len(manifest.unlabelled), *sizes, seed=optim.seed)


def gather(setup: Setup, trunk: Trunk, run: RunDir, *, progress: Progress, ranks: Ranks | None = None) -> Material:
    """Return everything a method may use; caches the views if the settings ask for it."""
    views = _views(setup, trunk, run, progress, ranks)
    labels = torch.from_numpy(setup.labels)
    unlabelled, config = setup.manifest.unlabelled, setup.config
    return Material(views, labels, unlabelled, config, progress.track, run.stages, setup.carried)


@contextmanager
def _logged(setup: Setup, run: RunDir, progress: Progress, launch: Launch) -> Iterator[tuple[Progress, Ranks, RunLog]]:
    """Connect the training processes. Only the leader prints, and its messages are logged."""
    ranks = join(launch)
    if not ranks.is_leader:
        progress = Progress(Console(quiet=True))
    with ExitStack() as stack:
        if ranks.is_leader:
            stack.enter_context(run.held())
            run.drop_unfinished()
        stack.enter_context(run.writing())
        log = stack.enter_context(RunLog(run.log if ranks.is_leader else None, progress.console))
        ranks.agree(f"{setup.config.to_toml()} {setup.manifest}")
        try:
            yield progress, ranks, log
        except (KeyboardInterrupt, SystemExit):
            progress.say(f"interrupted; resume with: ncd-serve train --resume {run.path}")
            raise
        ranks.wait()  # for the leader, which evaluates: torchrun ends it if the others exit long before
    leave()


def _keep_images(setup: Setup, run: RunDir, ranks: Ranks) -> None:
    """Write the list of images to the run directory, or check that they are those the run was started with."""
    if not ranks.is_leader:
        return
    if run.manifest.exists():
        if load_manifest_of_run(run.manifest).fingerprint != setup.manifest.fingerprint:
            raise images_changed(run)
    else:
        setup.keep(run)


def _start(setup: Setup, run: RunDir, ranks: Ranks, progress: Progress) -> None:
    """Run the stages before discovery, and write the checkpoint that every rank starts from."""
    if ranks.is_leader:
        state = _teach_trunk(setup, run, progress, processes=ranks.size)
    else:
        state = build_state(setup, initial_trunk(setup.config, weights=None)[0])
    ranks.follow_leader(state.model.trunk)
    material = gather(setup, state.model.trunk, run, progress=progress, ranks=ranks)
    if ranks.is_leader:
        _teach_branches(setup, state, run, material, progress)
    ranks.wait()


def _teach_trunk(setup: Setup, run: RunDir, progress: Progress, *, processes: int) -> TrainState:
    """Print the plan, then run the stages that train the trunk before it is frozen."""
    config, plan = setup.config, batch_plan(setup.config.optim, setup.manifest)
    parts, origin = initial_trunk(config, weights=config.model.weights_file)
    for text, style in plan_lines(setup, steps=len(plan), origin=origin, folder=run.path):
        progress.say(text, style=style)
    run.note_start(device=device_name(), weights=origin.facts(config.model.licence) if origin else None)
    state = build_state(setup, parts)
    if config.optim.epochs:
        cost = measure_step(state, setup, plan, processes=processes)
        announce_cost(expected_cost(config, cost, setup.manifest, steps=len(plan)), progress)
    stages = Stages(state.model, config, progress.track, run.stages)
    if config.rotations.epochs:
        stages.rotations(FileViews(setup.manifest.images, config.data), len(setup.manifest.images))
    if config.from_labels.epochs:
        stages.from_labels(FileViews(setup.manifest.images, config.data), torch.from_numpy(setup.labels))
    return state


def _teach_branches(setup: Setup, state: TrainState, run: RunDir, material: Material, progress: Progress) -> None:
    """Run the stages on the frozen trunk, and score the features that discovery starts from."""
    lesson = state.method.before_stages(state.model, material)
    if setup.config.supervised.epochs:
        stages = Stages(state.model, setup.config, progress.track, run.stages)
        stages.supervised(material.views.only(lesson.rows), lesson.classes)
    state.method.before_training(state.model, material)
    baselines = Monitor(setup, run.plots, progress).before_discovery(state)
    run.write_summary(run.read_summary().model_copy(update={"baselines": baselines}))
    save_checkpoint(state, run.initial)
    save_checkpoint(state, run.checkpoint)
    run.drop_stages()


def _fit(setup: Setup, state: TrainState, run: RunDir, log: RunLog, progress: Progress) -> None:
    config, ranks, plan = setup.config, state.ranks, batch_plan(setup.config.optim, setup.manifest)
    material = gather(setup, state.model.trunk, run, progress=progress, ranks=ranks)
    loader = batches(material.views, plan, workers=config.data.workers, device=state.model.device, ranks=ranks)
    if config.optim.compile:
        state.model.compile()
    rows, curves, monitor = (
        run.read_metrics()[: state.epoch],
        CurvePlots(run.plots),
        Monitor(setup, run.plots, progress),
    )
    epochs = config.optim.epochs
    display = EpochDisplay(progress, log, epochs=epochs, steps=len(plan), rows=rows)
    try:
        with _board(setup, state, run) as board, display:
            while state.epoch < epochs:
                display.say("preparing")
                state.method.before_epoch(state.model, state.epoch, material)
                ranks.follow_leader(state.model.branches, state.method)
                terms = train_epoch(state, display.steps(loader), plan, material.labels, config)
                state.method.after_epoch(state.model, state.epoch, material)
                if not ranks.is_leader:
                    continue
                display.say("evaluating the clusters")
                rows.append({"epoch": state.epoch, **terms, **monitor.after_epoch(state)})
                # Rows come before the checkpoint: a resumed run drops rows beyond it, but cannot restore missing ones.
                run.write_metrics(rows)
                save_checkpoint(state, run.checkpoint)
                curves.follow(rows)
                board(rows[-1])
                display.show(rows[-1])
    except (KeyboardInterrupt, SystemExit):
        if ranks.is_leader:
            write_report(setup, run, epoch=state.epoch, scored=False)
        raise
    if not ranks.is_leader:
        return
    run.drop_cache()
    draw_curves(rows, run.plots)
    if setup.carried is not None:
        setup, state = keep_ids(setup, state, run, progress=progress)
    evaluate(setup, state, run, progress=progress)


def _board(
    setup: Setup, state: TrainState, run: RunDir
) -> AbstractContextManager[Callable[[Mapping[str, Any]], object]]:
    """Return a context with the TensorBoard writer of epochs, or with one that writes nothing."""
    if not (setup.config.report.tensorboard and state.ranks.is_leader):
        return nullcontext(lambda row: None)
    return tensorboard(run.path / "tensorboard", epochs_done=state.epoch)


def _views(setup: Setup, trunk: Trunk, run: RunDir, progress: Progress, ranks: Ranks | None) -> Views:
    data, images = setup.config.data, setup.manifest.images
    if not data.cache_views:
        return FileViews(images, data)
    return cache_views(trunk, images, data, folder=data.cache_dir or run.cache, progress=progress, ranks=ranks)
