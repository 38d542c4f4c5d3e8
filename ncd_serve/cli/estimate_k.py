"""`estimate-k`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ncd_serve.cli.console import out, progress
from ncd_serve.cli.options import Accelerator, ConfigFile, Recipes, SetOptions, TrainingDevice, use_device
from ncd_serve.errors import needs_extra
from ncd_serve.options import (
    Backbone,
    CacheViews,
    DataRoot,
    Dataset,
    Download,
    EstimatorName,
    Labelled,
    ManifestFile,
    MostClasses,
    Seed,
    StrictData,
    Unlabelled,
    Weights,
)

if TYPE_CHECKING:
    from ncd_training.study.class_number import Estimate


def estimate_k(
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    strict_data: StrictData = False,
    manifest: ManifestFile = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    estimator: EstimatorName = None,
    most: MostClasses = None,
    backbone: Backbone = None,
    weights: Weights = None,
    download: Download = False,
    cache_views: CacheViews = None,
    device: TrainingDevice = Accelerator.AUTO,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    seed: Seed = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="Folder for the curve; default runs/<dataset>-classes-<time>.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate how many novel classes the unlabelled images have, for `train --novel-classes`.

    Examples:
        ncd-serve estimate-k --labelled known --unlabelled pile
    """
    options = locals()
    use_device(options.pop("device"))
    with needs_extra("train"):
        import ncd_training.api as api

        settings, folder = options.pop("set_"), options.pop("out_")
        del options["as_json"]
        found, run = api.estimate_classes(**options, settings=settings, out=folder, progress=progress)
    if as_json:
        out.print_json(json.dumps(found.facts()))
        return
    out.print(_table(found))
    out.print(
        "The estimate assumes that novel classes are about as large as known ones; it may miss smaller ones.\n"
        f"[bold]{found.line}[/bold]\n"
        f"curve: {run / 'plots' / 'estimate.png'}, {run / 'estimate.json'}\n"
        f"next: ncd-serve train ... --novel-classes {found.classes}",
        highlight=False,
        soft_wrap=True,
    )


def _table(found: Estimate) -> Table:
    """Return a row for every draw of held-back classes, or for every number of classes that was tried."""
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
