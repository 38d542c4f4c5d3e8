"""Discovery methods: the paper's own (`dual.py`), the systems that it compares with, and their common parts."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ncd_serve.errors import UsageError, did_you_mean
from ncd_training.config.resolve import explained
from ncd_training.objective.method import Method

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel


def method_named(name: str) -> type[Method]:
    """Return the class of a method."""
    if name not in _methods():
        raise UsageError(f"unknown method '{name}'", hint=did_you_mean(name, _methods()))
    return _methods()[name]


def checked(config: TrainConfig) -> TrainConfig:
    """Return the configuration with its method's own settings complete; UsageError if they do not fit the method."""
    kind = method_named(config.method.name)
    try:
        settings = kind.Settings.model_validate(config.method.own)
    except ValidationError as error:
        raise explained(error, kind.Settings, "method") from None
    method = config.method.model_copy(update=settings.model_dump())
    config = config.model_copy(update={"method": method})
    kind.check(config)
    return config


def build_method(config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Method:
    """Create the configured method for these numbers of unlabelled images and clusters."""
    return method_named(config.method.name).build(config, model, images=images, clusters=clusters)


@cache
def _methods() -> dict[str, type[Method]]:
    """Return every method class with a name, from the modules of this folder."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return {kind.name: kind for kind in _below(Method) if kind.name}


def _below(kind: type[Method]) -> Iterator[type[Method]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)
