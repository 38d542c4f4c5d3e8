"""Guard for imports of optional extras."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ncd_serve.errors import MissingExtraError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn the missing package of an extra into MissingExtraError (exit code 6); for imports inside functions."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ncd_"):
            raise
        raise MissingExtraError.of(extra, error.name) from None
