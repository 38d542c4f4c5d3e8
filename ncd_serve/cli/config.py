"""`config init`, `config show`, and how the options of a training command become a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ncd_serve.cli import extras
from ncd_serve.cli.console import out
from ncd_serve.errors import UsageError
from ncd_serve.files import write_text

Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", help="Settings on top of the dataset's own: paper, quick, plus, released, ..."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with settings.")]
MethodName = Annotated[
    str | None, typer.Option("--method", help="dual (the paper's), rankstat, dtc, kcl, mcl, kmeans or orca.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="One setting: section.key=value.")]

app = typer.Typer(help="Look at the settings of a run, or copy a recipe to change it.", no_args_is_help=True)


@app.command()
def init(
    recipe: Annotated[str, typer.Argument(help="A recipe, e.g. cub200.")],
    target: Annotated[Path | None, typer.Option("--out", help="The new file; default RECIPE.toml.")] = None,
) -> None:
    """Copy a recipe, to be changed and given to `train --config`."""
    text = _resolving().recipe_text(recipe)
    target = target or Path(f"{recipe}.toml")
    if target.exists():
        raise UsageError(f"{target} exists", hint="choose another --out")
    write_text(target, text)
    out.print(f"{target}\nnext: ncd-serve train --config {target}", highlight=False, soft_wrap=True)


@app.command()
def show(
    dataset: Annotated[str | None, typer.Option(help="A named dataset.")] = None,
    method: MethodName = None,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the settings that `train` would use, and where each one came from."""
    layers = config_layers(recipe, config, set_, {"data.dataset": dataset}, method)
    resolved = _resolving().merged(layers).model_dump(mode="json")
    origins = _resolving().origins(layers)
    if as_json:
        out.print_json(json.dumps({"settings": resolved, "origins": origins}))
        return
    for section, values in resolved.items():
        out.print(f"\n[{section}]", markup=False, highlight=False)
        for key, value in values.items():
            line = f"{key} = {json.dumps(value)}" if value is not None else f"# {key} is not set"
            out.print(f"{line:<40} # {origins.get(f'{section}.{key}', 'default')}", markup=False, highlight=False)


def config_layers(
    recipes: list[str] | None,
    config: Path | None,
    settings: list[str] | None,
    flags: dict[str, Any],
    method: str | None = None,
) -> Any:
    """Where settings come from, weakest first: recipes of dataset and method, then `--recipe` to `--set`."""
    resolving = _resolving()
    flags = {key: value for key, value in flags.items() if value is not None}
    own = resolving.recipe_for(flags["data.dataset"]) if "data.dataset" in flags else None
    return resolving.config_layers(
        recipes=[*filter(None, [own]), *(resolving.method_recipes(method) if method else []), *(recipes or [])],
        config_file=config,
        overrides={**flags, **dict(resolving.parse_override(text) for text in settings or [])},
    )


def data_flags(
    *,
    dataset: str | None,
    data_root: Path | None,
    labelled: Path | None,
    unlabelled: Path | None,
    manifest: Path | None,
    strict_data: bool,
) -> dict[str, Any]:
    """The settings that the options about images mean; None where one was not given."""
    places = {"root": data_root, "labelled": labelled, "unlabelled": unlabelled, "manifest": manifest}
    return {
        "data.dataset": dataset,
        **{f"data.{name}": place and str(place.absolute()) for name, place in places.items()},
        "data.strict": strict_data or None,
    }


def check_places(flags: dict[str, Any]) -> None:
    """Images come from one place."""
    folders = flags["data.labelled"] or flags["data.unlabelled"]
    if sum(place is not None for place in (flags["data.dataset"], folders, flags.get("data.manifest"))) > 1:
        raise UsageError(
            "a named dataset, own folders and a CSV file cannot be mixed",
            hint="give one of them",
        )


def check_resume(*options: Any) -> None:
    """Whoever gives other options with --resume expects them to do something."""
    if any(option not in (None, []) for option in options):
        raise UsageError(
            "--resume goes on with the run's own settings", hint="drop the other options, or start a new run"
        )


def resolve(
    recipes: list[str] | None,
    config: Path | None,
    settings: list[str] | None,
    flags: dict[str, Any],
    method: str | None = None,
) -> Any:
    """The configuration that the options of a training command make."""
    check_places(flags)
    return _resolving().merged(config_layers(recipes, config, settings, flags, method))


def _resolving() -> Any:
    return extras.load("ncd_training.config.resolve", extra="train")
