"""Help of the commands: panels, examples, and options as people read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

START, LOOK, OPERATE, RESEARCH = "Start here", "Look and name", "Operate", "Research"
_EXAMPLES = "\n\nExamples:\n"
_SPELLINGS = {"labeled": "labelled", "unlabeled": "unlabelled"}
Function = TypeVar("Function", bound=Callable[..., None])


class Command(TyperCommand):
    """Command whose flags are shown without a type, and whose options may be spelled as in America."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.context_settings = {
            **self.context_settings,
            "token_normalize_func": lambda word: _SPELLINGS.get(word, word),
        }

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_type_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    """Group of commands whose flags are shown without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_type_of_flags(super().get_params(ctx))


def _without_type_of_flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def split_help(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """Return the description and the examples of a command, from its docstring."""
    text, _, examples = (inspect.getdoc(function) or "").partition(_EXAMPLES)
    return text, [line.strip() for line in examples.splitlines()]


def command(app: typer.Typer, name: str | None = None, *, panel: str | None = None) -> Callable[[Function], Function]:
    """Add a function to a group as a command; the end of its docstring, after `Examples:`, ends its help."""

    def add(function: Function) -> Function:
        text, examples = split_help(function)
        shown = "\n".join(["[bold]Examples:[/bold]", *(f"  {escape(line)}" for line in examples)])
        return app.command(name, cls=Command, help=text, epilog=shown, rich_help_panel=panel)(function)

    return add
