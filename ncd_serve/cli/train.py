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
    if resume is not None:
        run, setup = open_run(resume)
        _load("train").resume(setup, run)
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
        setup = _load("setup").prepare(settings, messages)
        folder = output or Path("runs") / _load("run_dir").default_run_name(setup.manifest.name)
        run = _load("run_dir").RunDir.create(folder, setup.config)
        _load("train").train(setup, run)
    for line in _load("report").headlines(run.read_summary()):
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
    run_dir, setup = open_run(run)
    training = _load("train")
    summary = training.evaluate(setup, training.load_state(setup, run_dir), run_dir)
    if as_json:
        out.print_json(json.dumps(summary))
    else:
        out.print(_load("report").scores_table(summary))


def open_run(path: Path) -> tuple[Any, Any]:
    """A run directory, and its settings and images looked at: all that can be wrong before torch is needed."""
    run = _load("run_dir").RunDir.open(path)
    return run, _load("setup").prepare(run.config(), messages)


def _load(module: str) -> Any:
    return extras.load(f"ncd_training.{module}", extra="train")


def _resolve(recipe: str | None, config: Path | None, settings: list[str], flags: dict[str, Any]) -> Any:
    configuration = _load("config")
    dataset = flags.get("data.dataset")
    if dataset is not None and ("data.labelled" in flags or "data.unlabelled" in flags):
        raise UsageError("a named dataset and own folders cannot be mixed", hint="drop --dataset, or the folders")
    if recipe is None and dataset in configuration.recipe_names():
        recipe = dataset
    overrides = {**flags, **dict(configuration.parse_override(text) for text in settings)}
    return configuration.resolve_config(recipe=recipe, config_file=config, overrides=overrides)
