"""`train` and `evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ncd_serve.cli import extras
from ncd_serve.cli.console import messages, out
from ncd_serve.errors import UsageError


def train(
    dataset: Annotated[str | None, typer.Option(help="A named dataset, e.g. glyphs or cub200.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where the named dataset is; default data/<name>.")] = None,
    labelled: Annotated[Path | None, typer.Option(help="Your images: one folder for each known class.")] = None,
    unlabelled: Annotated[Path | None, typer.Option(help="Your images that nobody named, flat or nested.")] = None,
    novel_classes: Annotated[int | None, typer.Option(min=2, help="How many clusters to find.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Settings to start from; default: the dataset's own.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One setting: section.key=value.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random choices.")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="Run directory; default runs/<dataset>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an interrupted run.")] = None,
) -> None:
    """Train the dual-branch model on labelled images of known classes and a pile of unlabelled ones."""
    training = extras.load("ncd_training.train", extra="train")
    if resume is not None:
        run = training.resume(resume, console=messages)
    else:
        flags = {
            "data.dataset": dataset,
            "data.root": data_root and str(data_root.absolute()),
            "data.labelled": labelled and str(labelled.absolute()),
            "data.unlabelled": unlabelled and str(unlabelled.absolute()),
            "data.novel_classes": novel_classes,
            "optim.seed": seed,
        }
        settings = _resolve(
            recipe, config, set_ or [], {key: value for key, value in flags.items() if value is not None}
        )
        name = extras.load("ncd_training.run_dir", extra="train").default_run_name(dataset or "own")
        run = training.train(settings, output or Path("runs") / name, console=messages)
    for line in extras.load("ncd_training.report", extra="train").headlines(run.read_summary()):
        out.print(line, highlight=False)
    out.print(
        f"run directory: [bold]{run.path}[/bold]\nnext: ncd-serve evaluate {run.path}, ncd-serve export {run.path}",
        highlight=False,
        soft_wrap=True,
    )


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """ACC, NMI and ARI of a run on every split that has true classes."""
    summary = extras.load("ncd_training.train", extra="train").evaluate(run, console=messages)
    if as_json:
        out.print_json(json.dumps(summary))
    else:
        out.print(extras.load("ncd_training.report", extra="train").scores_table(summary))


def _resolve(recipe: str | None, config: Path | None, settings: list[str], flags: dict[str, Any]) -> Any:
    configuration = extras.load("ncd_training.config", extra="train")
    dataset = flags.get("data.dataset")
    if dataset is not None and ("data.labelled" in flags or "data.unlabelled" in flags):
        raise UsageError("a named dataset and own folders cannot be mixed", hint="drop --dataset, or the folders")
    if recipe is None and dataset in configuration.recipe_names():
        recipe = dataset
    overrides = {**flags, **dict(configuration.parse_override(text) for text in settings)}
    return configuration.resolve_config(recipe=recipe, config_file=config, overrides=overrides)
