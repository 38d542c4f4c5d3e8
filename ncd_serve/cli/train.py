"""`train`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ncd_serve.cli.after import show_generation, train_after
from ncd_serve.cli.console import answer, one_speaker, out, progress, show_next
from ncd_serve.cli.options import (
    Accelerator,
    ConfigFile,
    MethodName,
    Recipes,
    ResumeRun,
    SetOptions,
    TrainingDevice,
    use_device,
)
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.options import (
    Backbone,
    CacheViews,
    DataRoot,
    Dataset,
    Download,
    Epochs,
    Labelled,
    ManifestFile,
    NovelClasses,
    Pile,
    Seed,
    StrictData,
    TensorBoard,
    Unlabelled,
    Weights,
    check_resume,
)
from ncd_serve.progress import Progress


def _next_round(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Second round")


def train(
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    novel_classes: NovelClasses = None,
    pile: Pile = None,
    strict_data: StrictData = False,
    manifest: ManifestFile = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    backbone: Backbone = None,
    weights: Weights = None,
    download: Download = False,
    cache_views: CacheViews = None,
    epochs: Epochs = None,
    device: TrainingDevice = Accelerator.AUTO,
    method: MethodName = None,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    seed: Seed = None,
    out_: Annotated[Path | None, typer.Option("--out", help="Run directory; default runs/<dataset>-<time>.")] = None,
    resume: ResumeRun = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, try two steps, estimate time and memory.")
    ] = False,
    tensorboard: TensorBoard = False,
    after: Annotated[
        Path | None,
        _next_round(help="Bundle or run to append new categories to; its ids and names stay. Trains nothing."),
    ] = None,
    add: Annotated[
        Path | None, _next_round(help="With --after: new images, a folder or rows; --retrain needs none.")
    ] = None,
    accept: Annotated[
        Path | None, _next_round(help="With --after: candidates of `discover`; default: all that it finds.")
    ] = None,
    retrain: Annotated[
        bool, _next_round("--retrain", help="With --after: train on old and new images; clusters keep their ids.")
    ] = False,
    promote: Annotated[
        bool, _next_round("--promote", help="With --retrain: images of named clusters count as labelled.")
    ] = False,
) -> None:
    """Group unlabelled images into new classes, with the help of labelled images of known ones.

    Examples:
        ncd-serve train --labelled known --unlabelled pile
        ncd-serve train --labelled known --unlabelled pile --novel-classes 8 --dry-run
        ncd-serve train --resume runs/birds
        ncd-serve train --after runs/birds/bundle --add new
        ncd-serve train --after runs/birds/bundle --add new --retrain --promote
    """
    options = locals()
    if after or add or accept or retrain or promote:
        train_after(options)
        return
    use_device(options.pop("device"))
    with needs_extra("train"):
        import ncd_training.api as api
        from ncd_training.base.processes import Launch

    with one_speaker(is_leader=Launch.read().is_leader), needs_extra("train"):
        if resume is not None:
            if dry_run:
                raise UsageError("--dry-run is for a new run", hint="drop --resume")
            check_resume(options)
            run = api.open_run(resume, progress=progress).resume()
        else:
            settings, folder = options.pop("set_"), options.pop("out_")
            own = ("resume", "dry_run", "after", "add", "accept", "retrain", "promote")
            given = {name: value for name, value in options.items() if name not in own}
            if dry_run:
                # The plan is the answer here, so it goes where answers go.
                api.dry_run(**given, settings=settings, progress=Progress(out))
                return
            run = api.discover(**given, settings=settings, out=folder, progress=progress)
        if run.changes:  # the rest of a next generation
            show_generation(run)
            return
        for line in (*run.headlines, run.findings):
            out.print(line, highlight=False)
        if run.verdict:
            answer(f"without labels: {'; '.join(run.verdict)}")
        out.print(
            f"run directory: [bold]{escape(str(run.path))}[/bold], see report.html there\n"
            f"clusters: ncd-serve gallery {escape(shlex.quote(str(run.path)))}",
            highlight=False,
            soft_wrap=True,
        )
        show_next("export", run.path)
