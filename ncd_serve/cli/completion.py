"""Completion of names on the command line: datasets, recipes, methods, backbones and runs, without torch.

Options are declared where training finds them too; their completion, which asks training for names, is added here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from ncd_serve import options as shared
from ncd_serve.cli import options
from ncd_serve.errors import MissingExtraError, needs_extra
from ncd_serve.places import find_runs

OWN_BACKBONES = ("cifar_resnet18", "efficientnet_lite0", "small_resnet", "vit_small")
_TIMM_NAME = re.compile(r"^@register_model\s+def (\w+)", re.MULTILINE)


def dataset_names() -> Iterable[str]:
    """Return the names of the datasets."""
    from ncd_training.data.datasets import DATASETS

    return DATASETS


def recipe_names() -> Iterable[str]:
    """Return the names of the recipes, those for people first."""
    from ncd_training.config.resolve import listed_recipes

    return (name for group in listed_recipes().values() for name in group)


def method_names() -> Iterable[str]:
    """Return the names of the methods."""
    from ncd_training.config.resolve import method_names

    return method_names()


def backbone_names() -> Iterable[str]:
    """Return the names of backbones: short ones, then timm's, read from its files, since its import takes seconds."""
    found = find_spec("timm")
    folders = (found.submodule_search_locations if found else None) or ()
    files = (file for folder in folders for file in sorted((Path(folder) / "models").glob("*.py")))
    return [*OWN_BACKBONES, *(name for file in files for name in _TIMM_NAME.findall(file.read_text(encoding="utf-8")))]


def finished_runs() -> Iterable[str]:
    """Return the finished runs in this folder and below it."""
    return map(str, find_runs())


def unfinished_runs() -> Iterable[str]:
    """Return the runs that can be resumed."""
    return map(str, find_runs(finished=False))


def add_to_options() -> None:
    """Give every option of a name its completion."""
    for option, names in (
        (shared.Dataset, dataset_names),
        (shared.Backbone, backbone_names),
        (options.Recipes, recipe_names),
        (options.MethodName, method_names),
        (options.RunArgument, finished_runs),
        (options.ResumeRun, unfinished_runs),
    ):
        _add(option, names)


def _add(option: Any, names: Callable[[], Iterable[str]]) -> None:
    def complete(incomplete: str) -> list[str]:
        try:
            with needs_extra("train"):
                return [name for name in names() if name.startswith(incomplete)]
        except MissingExtraError:
            return []

    get_args(option)[1].autocompletion = complete
