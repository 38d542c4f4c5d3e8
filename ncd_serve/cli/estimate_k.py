"""`estimate-k`."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ncd_serve.cli import extras
from ncd_serve.cli.config import ConfigFile, Recipes, Settings, data_flags, resolve
from ncd_serve.cli.console import messages, out
from ncd_serve.cli.options import (
    CacheViews,
    DataRoot,
    Dataset,
    Labelled,
    ManifestFile,
    Seed,
    StrictData,
    Unlabelled,
    Weights,
)


class Estimator(str, Enum):
    """How the number is found."""

    BALANCED = "balanced"
    DTC = "dtc"
    GCD = "gcd"


def estimate_k(
    dataset: Dataset = None,
    data_root: DataRoot = None,
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    estimator: Annotated[
        Estimator | None, typer.Option(help="balanced (the default), or as published: dtc, gcd.")
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(min=2, help="dtc, gcd: try up to so many; default 100, or half as many as there are images."),
    ] = None,
    weights: Weights = None,
    cache_views: CacheViews = None,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: Settings = None,
    seed: Seed = None,
    output: Annotated[
        Path | None, typer.Option("--out", help="Where to leave the curve; default runs/<dataset>-classes-<time>.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate how many novel classes the unlabelled images have, for `train --novel-classes`."""
    flags = {
        **data_flags(
            dataset=dataset,
            data_root=data_root,
            labelled=labelled,
            unlabelled=unlabelled,
            manifest=manifest,
            strict_data=strict_data,
        ),
        "data.novel_classes": "auto",
        "data.cache_views": cache_views,
        "model.weights": weights and str(weights.absolute()),
        "optim.seed": seed,
        "estimate.estimator": estimator and estimator.value,
        "estimate.most": most,
    }
    settings, run_dir = resolve(recipe, config, set_, flags), _load("base.run_dir")
    if settings.model.weights is not None:
        run_dir.weights_path(settings.model.weights)
    setup = _load("data.prepare").prepare(settings, messages)
    _load("model.weights").check_weights(setup.config)
    folder = output or Path("runs") / run_dir.default_run_name(f"{setup.manifest.name}-classes")
    run = run_dir.RunDir.create(folder, setup.config, command="estimate-k")
    found = _load("study.class_features").estimate(setup, run)
    run.drop_cache()
    if as_json:
        out.print_json(json.dumps(found.facts()))
        return
    out.print(_table(found))
    out.print(
        "Novel classes are taken to have about as many images as known ones; with fewer, some are missed.\n"
        f"[bold]{found.line}[/bold]\n"
        f"curve: {run.plots / 'estimate.png'}, {run.estimate}\n"
        f"next: ncd-serve train ... --novel-classes {found.classes}",
        highlight=False,
        soft_wrap=True,
    )


def _table(found: Any) -> Table:
    """What every draw of held-back classes said, or the numbers that were tried and what spoke for each."""
    if found.cuts:
        table = Table("held-back classes", "novel classes")
        for cut in found.cuts:
            table.add_row(str(cut.probes), str(cut.classes))
        return table
    table = Table("novel classes", "ACC of known classes")
    if found.by_silhouette is not None:
        table.add_column("silhouette")
    for trial in found.trials:
        figures = [trial.accuracy, *([trial.silhouette] if found.by_silhouette is not None else [])]
        table.add_row(str(trial.classes), *(f"{figure:.3f}" for figure in figures))
    return table


def _load(module: str) -> Any:
    return extras.load(f"ncd_training.{module}", extra="train")
