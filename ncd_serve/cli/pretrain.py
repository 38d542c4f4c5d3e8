"""`pretrain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ncd_serve.cli import extras
from ncd_serve.cli.config import ConfigFile, Recipes, Settings, check_resume, data_flags, resolve
from ncd_serve.cli.console import messages, out
from ncd_serve.cli.options import DataRoot, ManifestFile, Seed, StrictData
from ncd_serve.errors import UsageError


def pretrain(
    method: Annotated[str | None, typer.Option(help="rotnet (the default) or moco.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A named dataset: all of its training images.")] = None,
    data_root: DataRoot = None,
    images: Annotated[
        Path | None, typer.Option("--images", "--unlabelled", help="Your images, flat or nested.")
    ] = None,
    labelled: Annotated[Path | None, typer.Option(help="More of your images; their classes are not used.")] = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    trunk: Annotated[str | None, typer.Option(help="The network, e.g. resnet50 or cifar_resnet18.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="How many epochs.")] = None,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: Settings = None,
    seed: Seed = None,
    output: Annotated[Path | None, typer.Option("--out", help="Run directory; default runs/<name>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an interrupted run.")] = None,
) -> None:
    """Teach a network on your images, without labels, to start `train --weights` from."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("pretraining runs in one process", hint="start it without torchrun")
    run_dir, setting_up = _load("base.run_dir"), _load("data.prepare")
    flags = {
        "pretrain.method": method,
        **data_flags(
            dataset=dataset,
            data_root=data_root,
            labelled=labelled,
            unlabelled=images,
            manifest=manifest,
            strict_data=strict_data,
        ),
        "model.trunk": trunk,
        "pretrain.epochs": epochs,
        "optim.seed": seed,
    }
    if resume is not None:
        check_resume(*flags.values(), recipe, config, set_, output)
        run = run_dir.RunDir.open(resume, command="pretrain")
        setup = setting_up.prepare_images(run.config(), messages)
    else:
        # The defaults are RotNet's; MoCo's are a recipe.
        recipes = [*(["moco"] if method == "moco" else []), *(recipe or [])]
        setup = setting_up.prepare_images(resolve(recipes, config, set_, flags), messages)
        _load("model.weights").check_weights(setup.config)
        name = run_dir.default_run_name(f"{setup.manifest.name}-{setup.config.pretrain.method}")
        run = run_dir.RunDir.create(output or Path("runs") / name, setup.config, command="pretrain")
    _load("run.pretrain").pretrain(setup, run)
    out.print(
        f"weights: [bold]{run.path / run_dir.PRETRAINED}[/bold]\n"
        f"next: ncd-serve train --weights {run.path} --set model.trunk={setup.config.model.trunk} ...",
        highlight=False,
        soft_wrap=True,
    )


def _load(module: str) -> Any:
    return extras.load(f"ncd_training.{module}", extra="train")
