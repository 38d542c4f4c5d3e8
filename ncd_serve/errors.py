"""Every error a user can cause, and the exit code it ends the command with.

    NcdError                  1   bare: a bug in ncd-serve, or another process of the same torchrun has ended
    ├── UsageError            2   wrong flag, unknown dataset, unknown config key
    ├── DataError             3   missing, empty or unreadable images, weights, runs, bundles
    ├── ExportMismatchError   4   the exported model does not answer like the trained one
    ├── ServerError           5   Triton cannot be started, reached, or does not speak the contract
    └── MissingExtraError     6   an optional part of the installation is needed

An interrupted command ends with 130. Each error says what is wrong; its hint says what to do about it.
"""

from __future__ import annotations

from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class NcdError(Exception):
    """Base of all errors shown to users as `error:` and `hint:` lines."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint and hasattr(self, "add_note"):  # since Python 3.11 a traceback shows it, e.g. in a notebook
            self.add_note(f"hint: {hint}")


class UsageError(NcdError):
    """The command was called wrongly."""

    exit_code = 2


class DataError(NcdError):
    """Error for files of the user that are missing, empty or unusable."""

    exit_code = 3


class ExportMismatchError(NcdError):
    """The exported graph disagrees with the trained model."""

    exit_code = 4


class ServerError(NcdError):
    """A Triton server cannot be started, reached or trusted."""

    exit_code = 5


class MissingExtraError(NcdError):
    """A package of an optional extra is not installed."""

    exit_code = 6

    @classmethod
    def of(cls, extra: str, missing: str) -> MissingExtraError:
        """Return the usual error: the missing package, and the command that installs it."""
        return cls(f"this needs {missing}, which is not installed", hint=f"pip install 'ncd-serve[{extra}]'")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a failed import of a package that is not installed into MissingExtraError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ncd_"):
            raise
        raise MissingExtraError.of(extra, error.name) from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint with the nearest known word, or with all known words."""
    known = sorted(known)
    near = get_close_matches(word, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
