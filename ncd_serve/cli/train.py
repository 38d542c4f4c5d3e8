"""`train` and `evaluate`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ncd_serve.cli import extras
from ncd_serve.cli.config import ConfigFile, MethodName, Recipes, Settings, check_resume, data_flags, resolve
from ncd_serve.cli.console import messages, out
from ncd_serve.cli.options import (
    CacheViews,
    DataRoot,
    Dataset,
    Labelled,
    ManifestFile,
    NovelClasses,
    Seed,
    StrictData,
    Unlabelled,
    Weights,
)
from ncd_serve.errors import DataError, UsageError


def train(
    dataset: Dataset = None,
    data_root: DataRoot = None,
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    novel_classes: NovelClasses = None,
    weights: Weights = None,
    cache_views: CacheViews = None,
    method: MethodName = None,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: Settings = None,
    seed: Seed = None,
    output: Annotated[Path | None, typer.Option("--out", help="Run directory; default runs/<dataset>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an interrupted run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, try two steps, say what it costs.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write figures for TensorBoard too.")] = False,
) -> None:
    """Train on labelled images of known classes and a pile of unlabelled ones: the dual-branch model, or a baseline."""
    flags = {
        **data_flags(
            dataset=dataset,
            data_root=data_root,
            labelled=labelled,
            unlabelled=unlabelled,
            manifest=manifest,
            strict_data=strict_data,
        ),
        "data.novel_classes": cluster_number(novel_classes),
        "data.cache_views": cache_views,
        "model.weights": weights and str(weights.absolute()),
        "optim.seed": seed,
        "report.tensorboard": tensorboard or None,
    }
    if resume is not None:
        if dry_run:
            raise UsageError("--dry-run is for a new run", hint="drop --resume")
        check_resume(*flags.values(), method, recipe, config, set_, output)
        run, setup = _opened(resume)
        _check_settings(setup.config)
    else:
        settings = resolve(recipe, config, set_, flags, method)
        _check_settings(settings)
        if settings.model.weights is not None:
            _load("base.run_dir").weights_path(settings.model.weights)
        setup = _load("data.prepare").prepare(settings, messages)
        _load("model.weights").check_weights(setup.config)
        if dry_run and setup.config.data.novel_classes == "auto":
            raise UsageError("a dry run needs the number of clusters", hint="give --novel-classes N, a guess will do")
        if dry_run:
            # The plan is the answer here, so it goes where answers go.
            _load("run.train").dry_run(replace(setup, console=out))
            return
        if output is None and "RANK" in os.environ:
            raise UsageError("torchrun's processes need one run directory", hint="give --out DIR")
        folder = output or Path("runs") / _load("base.run_dir").default_run_name(setup.manifest.name)
        runs = _load("base.run_dir").RunDir
        run = runs.of_this_job(folder, setup.config) or runs.create(folder, setup.config)
    if setup.config.data.novel_classes == "auto":
        setup = _load("study.class_features").with_estimate(setup, run)
    _load("run.train").train(setup, run)
    for line in _load("summary.figures").headlines(run.read_summary()):
        out.print(line, highlight=False)
    out.print(
        f"run directory: [bold]{run.path}[/bold], see report.html there\n"
        f"next: ncd-serve gallery {run.path}, ncd-serve export {run.path}",
        highlight=False,
        soft_wrap=True,
    )


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    per_class: Annotated[bool, typer.Option("--per-class", help="Show all classes of all splits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """ACC, NMI, ARI and classes of a run on every split that has true classes, and its pseudo labels' quality."""
    run_dir, setup = open_run(run)
    training = _load("run.train")
    summary = training.evaluate(setup, training.load_state(setup, run_dir), run_dir)
    if as_json:
        out.print_json(json.dumps(summary))
    elif not summary["scores"]:
        out.print(
            f"no true classes are known for these images, so there is nothing to score; look at the clusters: "
            f"ncd-serve gallery {run}, and at {run_dir.report}",
            highlight=False,
            soft_wrap=True,
        )
    else:
        for table in _load("summary.figures").score_tables(summary, every_class=per_class):
            out.print(table)


def open_run(path: Path) -> tuple[Any, Any]:
    """A trained run directory, and its settings and images looked at."""
    run, setup = _opened(path)
    if setup.config.data.novel_classes == "auto":
        raise DataError(f"{path} was stopped while the number of classes was estimated", hint=run.next_step)
    return run, setup


def _opened(path: Path) -> tuple[Any, Any]:
    """A run directory to go on with: all that can be wrong before torch is needed."""
    run = _load("base.run_dir").RunDir.open(path)
    return run, _load("data.prepare").prepare(run.config(), messages)


def cluster_number(text: str | None) -> int | str | None:
    """What --novel-classes says; settings refuse what is no number."""
    return int(text) if text is not None and text.isdecimal() else text


def _check_settings(config: Any) -> None:
    if config.report.tensorboard:
        extras.load("ncd_training.summary.live", extra="tensorboard")
    if config.data.novel_classes == "auto" and "RANK" in os.environ:
        raise UsageError("one process estimates the number of classes", hint="ask ncd-serve estimate-k first")


def _load(module: str) -> Any:
    return extras.load(f"ncd_training.{module}", extra="train")
