"""`config init` and `config show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import out
from ncd_serve.cli.help import Group, command
from ncd_serve.cli.options import ConfigFile, MethodName, Recipes, SetOptions
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.files import write_text

app = typer.Typer(help="Show the settings of a run, or copy a recipe to change it.", no_args_is_help=True, cls=Group)


@command(app)
def init(
    recipe: Annotated[str, typer.Argument(help="A recipe, e.g. cub200.")],
    target: Annotated[Path | None, typer.Option("--out", help="The new file; default RECIPE.toml.")] = None,
) -> None:
    """Copy a recipe, to be changed and given to `train --config`.

    Examples:
        ncd-serve config init cub200 --out mine.toml
    """
    with needs_extra("train"):
        from ncd_training.config.resolve import recipe_text

    text = recipe_text(recipe)
    target = target or Path(f"{recipe}.toml")
    if target.exists():
        raise UsageError(f"{target} exists", hint="choose another --out")
    write_text(target, text)
    out.print(f"{target}\nnext: ncd-serve train --config {target}", highlight=False, soft_wrap=True)


@command(app)
def show(
    dataset: Annotated[str | None, typer.Option(help="A named dataset.")] = None,
    method: MethodName = None,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the settings that `train` would use, and where each one comes from.

    Examples:
        ncd-serve config show --dataset cub200 --recipe quick
        ncd-serve config show --recipe own-images --json
    """
    with needs_extra("train"):
        from ncd_training.config.resolve import layers_of_call, merged, origins
        from ncd_training.objective.method import checked

    flags = {"data.dataset": dataset} if dataset else {}
    layers = layers_of_call(flags, method=method, recipe=recipe, config=config, settings=set_)
    resolved, sources = checked(merged(layers)).model_dump(mode="json"), origins(layers)
    if as_json:
        out.print_json(json.dumps({"settings": resolved, "origins": sources}))
        return
    for section, values in resolved.items():
        out.print(f"\n[{section}]", markup=False, highlight=False)
        for key, value in values.items():
            line = f"{key} = {json.dumps(value)}" if value is not None else f"# {key} is not set"
            out.print(f"{line:<40} # {sources.get(f'{section}.{key}', 'default')}", markup=False, highlight=False)
