"""Configuration from recipes, a TOML file, options and `--set section.key=value`; later ones win."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from ncd_serve.errors import DataError, UsageError, did_you_mean
from ncd_serve.text import first_problem
from ncd_training.config.schema import MethodConfig, TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN_IMAGES = "own-images"  # recipe of the user's own images, if none is given
_RENAMED = {"plus": OWN_IMAGES}  # earlier names of recipes
_PAPER = "paper"  # adds nothing: a dataset's own recipe holds the paper's settings already
_PAPER_LINE = "The paper's own settings, also for your own images: for a GPU, days on a CPU."
_FOR_PEOPLE = (OWN_IMAGES, "quick", _PAPER, "joint", "open-world", "released")


class Layer(NamedTuple):
    """Settings from one origin: a recipe, a file or the command line."""

    origin: str
    settings: dict[str, Any]


def resolve_config(
    *, recipes: Sequence[str] = (), config_file: Path | None = None, overrides: dict[str, Any] | None = None
) -> TrainConfig:
    """Resolve recipes, then a file, then overrides (`{"optim.epochs": 10}`); UsageError for wrong settings."""
    return merged(config_layers(recipes=recipes, config_file=config_file, overrides=overrides))


def config_layers(
    *, recipes: Sequence[str] = (), config_file: Path | None = None, overrides: dict[str, Any] | None = None
) -> list[Layer]:
    """Return the layers of settings, weakest first. After `dtc`, `quick` is followed by `dtc-quick` if there is one."""
    layers, before = [], list[str]()
    for name in (_RENAMED.get(name, name) for name in recipes):
        if name != _PAPER:
            refined = [f"{earlier}-{name}" for earlier in before if f"{earlier}-{name}" in recipe_names()]
            layers += [Layer(f"recipe {part}", tomllib.loads(recipe_text(part))) for part in (name, *refined)]
            before.append(name)
    if "model.backbone" in (overrides or {}):
        layers = [_for_any_backbone(layer) for layer in layers]
        layers.append(Layer("command line", {"model": {"download": True}}))  # naming a network asks for its weights
    if config_file is not None:
        layers.append(Layer(str(config_file), _read_toml(config_file)))
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        layers.append(Layer("command line", {section: {name: value}} if name else {section: value}))
    return layers


def layers_of_call(
    flags: Mapping[str, Any],
    *,
    method: str | None = None,
    recipe: str | Sequence[str] | None = None,
    config: Path | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
) -> list[Layer]:
    """Return the layers of a command: recipes of dataset and method, `--recipe`, `--config`, options, `--set`."""
    check_places(flags)
    own = recipe_for(flags["data.dataset"]) if "data.dataset" in flags else None
    requested = [recipe] if isinstance(recipe, str) else list(recipe or ())
    if not (requested or own or method or config):
        requested = [OWN_IMAGES]
    return config_layers(
        recipes=[*filter(None, [own]), *(method_recipes(method) if method else []), *requested],
        config_file=config,
        overrides={**flags, **overrides_of(settings)},
    )


def _for_any_backbone(recipe: Layer) -> Layer:
    """Return a recipe without the image size and normalisation of its own backbone."""
    own = {"data": ("resolution", "resize", "interpolation"), "model": ("mean", "std")}
    settings = {
        section: {key: value for key, value in values.items() if key not in own.get(section, ())}
        for section, values in recipe.settings.items()
    }
    return Layer(recipe.origin, settings)


def check_places(flags: Mapping[str, Any]) -> None:
    """Raise UsageError if images are given in more than one way."""
    folders = flags.get("data.labelled") or flags.get("data.unlabelled")
    places = flags.get("data.dataset"), folders, flags.get("data.manifest")
    if sum(place is not None for place in places) > 1:
        raise UsageError(
            "a named dataset, your own folders and a CSV file cannot be mixed",
            hint="give only one of --dataset, --labelled with --unlabelled, and --manifest",
        )


def merged(layers: Sequence[Layer]) -> TrainConfig:
    """Merge the layers into one configuration."""
    tree: dict[str, Any] = {}
    for layer in layers:
        _merge(tree, deepcopy(layer.settings))
    try:
        return TrainConfig.model_validate(_with_current_keys(tree))
    except ValidationError as error:
        raise explained(error, TrainConfig) from None


def origins(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the origin of each setting that is not a default, by `section.key`."""
    found: dict[str, str] = {}
    for layer in layers:
        for section, values in layer.settings.items():
            found |= {f"{section}.{key}": layer.origin for key in values}
    return found


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _recipes().iterdir() if entry.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """Return the text of a recipe, including comments."""
    if name not in recipe_names():
        raise UsageError(f"unknown recipe '{name}'", hint=did_you_mean(name, recipe_names()))
    text: str = (_recipes() / f"{name}.toml").read_text(encoding="utf-8")
    return text


def listed_recipes() -> dict[str, dict[str, str]]:
    """Return the recipes with a line about each, in groups: those for people first."""
    groups: dict[str, dict[str, str]] = {
        "for your own images": {},
        "of named datasets": {},
        "of methods (--method NAME adds them)": {},
        "parts of others": {},
    }
    own, datasets, methods, parts = groups.values()
    for name in _FOR_PEOPLE:
        own[name] = _PAPER_LINE if name == _PAPER else _first_line(name)
    for name in (name for name in recipe_names() if name not in own):
        settings = tomllib.loads(recipe_text(name))
        is_dataset, is_method = "dataset" in settings.get("data", {}), "name" in settings.get("method", {})
        (datasets if is_dataset else methods if is_method else parts)[name] = _first_line(name)
    return groups


def _first_line(recipe: str) -> str:
    return recipe_text(recipe).partition("\n")[0].removeprefix("# ")


def method_recipes(method: str) -> list[str]:
    """Return the recipes that `--method` adds to a dataset's recipe; the paper's own method adds none."""
    if method not in method_names():
        raise UsageError(f"unknown method '{method}'", hint=did_you_mean(method, method_names()))
    return [] if method == MethodConfig().name else [method]


def method_names() -> list[str]:
    """Return the names of the methods: the paper's own, and those that have a recipe."""
    declared = (tomllib.loads(recipe_text(name)).get("method", {}).get("name") for name in recipe_names())
    return sorted({MethodConfig().name, *filter(None, declared)})


def recipe_for(dataset: str) -> str | None:
    """Return the recipe of a dataset: its own, or its family's (`imagenet` for `imagenet-a`)."""
    fitting = [name for name in recipe_names() if dataset == name or dataset.startswith(f"{name}-")]
    return max(fitting, key=len, default=None)


def overrides_of(settings: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    """Return settings by `section.key`, given like that or as texts `section.key=value`."""
    if isinstance(settings, Mapping):
        return dict(settings)
    return dict(parse_override(text) for text in settings or ())


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `section.key=value`; the value is TOML (a bare word is a string)."""
    key, separator, value = text.partition("=")
    if not separator or "." not in key:
        raise UsageError(f"cannot read --set {text}", hint="write --set section.key=value, e.g. --set optim.epochs=10")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _recipes() -> Any:
    return files("ncd_training.config") / "recipes"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", hint="correct the file at that line") from None


def _merge(tree: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _with_current_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """Translate keys of older runs and files: `model.trunk` is `backbone`, `dtc_variant` is `variant` of dtc."""
    if isinstance(model := tree.get("model"), dict) and "trunk" in model:
        tree = {**tree, "model": {"backbone" if key == "trunk" else key: value for key, value in model.items()}}
    method = tree.get("method")
    if not isinstance(method, dict):
        return tree
    old = {key: key.partition("_") for key in method if key.partition("_")[0] in ("dtc", "kcl", "orca")}
    kept = {key: value for key, value in method.items() if key not in old}
    own = {new: method[key] for key, (owner, _, new) in old.items() if owner == method.get("name", "dual")}
    return {**tree, "method": {**kept, **own}}


def explained(error: ValidationError, model: Any, *sections: str) -> UsageError:
    """Turn the first validation error into a UsageError that names the key below `sections`."""
    first = error.errors()[0]
    key = ".".join(map(str, (*sections, *first["loc"])[:2]))  # deeper levels are parts of a value
    if not key:
        return UsageError(first_problem(error), hint="`ncd-serve config show` lists all settings and their origins")
    if first["type"] != "extra_forbidden":
        text = first_problem(error, levels=2 - len(sections))
        return UsageError(".".join((*sections, text)), hint=f"change its value, which is {first.get('input')!r}")
    *parents, unknown = (str(part) for part in first["loc"])
    fields = model.model_fields
    for parent in parents:
        fields = fields[parent].annotation.model_fields
    return UsageError(f"unknown config key '{key}'", hint=did_you_mean(unknown, fields))
