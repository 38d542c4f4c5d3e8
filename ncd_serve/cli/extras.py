"""Import the heavy packages when a command needs them, and say how to get them when they are not there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ncd_serve.errors import MissingExtraError


def load(module: str, *, extra: str) -> Any:
    """Import one of our own modules that needs an optional extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ncd_"):
            raise
        raise MissingExtraError.of(extra, error.name) from None
