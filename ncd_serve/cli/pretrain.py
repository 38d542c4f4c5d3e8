"""`pretrain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import out, progress
from ncd_serve.cli.options import Accelerator, ConfigFile, Recipes, ResumeRun, SetOptions, TrainingDevice, use_device
from ncd_serve.errors import needs_extra
from ncd_serve.options import (
    Backbone,
    DataRoot,
    Dataset,
    ManifestFile,
    PretrainEpochs,
    PretrainImages,
    PretrainLabelled,
    PretrainMethod,
    Seed,
    StrictData,
    check_resume,
)


def pretrain(
    method: PretrainMethod = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    images: PretrainImages = None,
    labelled: PretrainLabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    backbone: Backbone = None,
    epochs: PretrainEpochs = None,
    device: TrainingDevice = Accelerator.AUTO,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    seed: Seed = None,
    out_: Annotated[Path | None, typer.Option("--out", help="Run directory; default runs/<name>-<time>.")] = None,
    resume: ResumeRun = None,
) -> None:
    """Pretrain a backbone on your images without labels (self-supervised), for `train --weights`.

    Examples:
        ncd-serve pretrain --images photos --backbone resnet18
        ncd-serve pretrain --method moco --images photos --epochs 100
    """
    options = locals()
    use_device(options.pop("device"))
    with needs_extra("train"):
        import ncd_training.api as api
        from ncd_training.base.run_dir import RunDir

        if resume is not None:
            check_resume(options)
        settings, folder = options.pop("set_"), options.pop("out_")
        weights = api.pretrain(**options, settings=settings, out=folder, progress=progress)
    run = RunDir(weights.parent)
    out.print(
        f"weights: [bold]{weights}[/bold]\n"
        f"next: ncd-serve train --weights {run.path} --backbone {run.config().model.backbone} ...",
        highlight=False,
        soft_wrap=True,
    )
