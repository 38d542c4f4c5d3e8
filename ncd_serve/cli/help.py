"""Help of the commands: panels, examples, options as people read them; and what is wrong with a typed line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from ncd_serve.errors import UsageError, did_you_mean
from ncd_serve.text import first_problem

START, LOOK, OPERATE, RESEARCH = "Start here", "Look and name", "Operate", "Research"
_EXAMPLES = "\n\nExamples:\n"
_SPELLINGS = {"labeled": "labelled", "unlabeled": "unlabelled"}
_TYPERS_USAGE_ERROR: Any = typer.BadParameter.__base__  # click's, or typer's copy of it
_TYPES = {
    "<path>": "PATH",
    "<list[path]>": "PATH",
    "<str>": "TEXT",
    "<list[str]>": "TEXT",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "NUMBER",
    "<float range>": "NUMBER",
}
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
        return _with_plain_types(super().get_params(ctx), ctx)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **more: Any) -> Any:
        """Parse a typed line."""
        with _plain_errors(f"{parent.command_path} {info_name}" if parent else str(info_name)):
            return super().make_context(info_name, args, parent, **more)


class Group(TyperGroup):
    """Group of commands whose flags are shown without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _with_plain_types(super().get_params(ctx), ctx)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **more: Any) -> Any:
        """Parse a typed line."""
        with _plain_errors(f"{parent.command_path} {info_name}" if parent else str(info_name)):
            return super().make_context(info_name, args, parent, **more)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that a line names."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(f"no command '{args[0]}'", hint=did_you_mean(args[0], self.commands))
        with _plain_errors(ctx.command_path):
            return super().resolve_command(ctx, args)


@contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    """Raise typer's errors in the line of a command as ours, without words of pydantic, which checks its values."""
    try:
        yield
    except _TYPERS_USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        near = getattr(error, "possibilities", None)
        raise UsageError(_in_words(error), hint=f"did you mean {near[0]}?" if near else f"see {path} --help") from None


def _in_words(error: Any) -> str:
    checked = error.__cause__
    if hasattr(checked, "errors") and error.param is not None:
        problem = first_problem(checked, levels=0).rstrip(".")
        name = max(error.param.opts, key=len)
        return f"{name} {problem}" if problem.startswith("must be ") else f"{name}: {problem}"
    text = str(error.format_message()).partition(" (Possible")[0].rstrip(".")
    return text[0].lower() + text[1:]


def _with_plain_types(parameters: list[Any], ctx: Any) -> list[Any]:
    """Name the types of options in capitals, as in their metavars; flags and arguments need none."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            shown = parameter.display_type(ctx).strip("<>")
            choices = shown if "|" in shown else ""
            parameter.metavar = parameter.metavar or choices or parameter.name.upper()
            parameter.display_type = lambda ctx: ""
        elif parameter.metavar is None and hasattr(parameter, "display_type"):
            shown = parameter.display_type(ctx)
            parameter.metavar = _TYPES.get(shown, shown.strip("<>"))
    return parameters


def split_help(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """Return the description and the examples of a command, from its docstring."""
    text, _, examples = (inspect.getdoc(function) or "").partition(_EXAMPLES)
    return text, [line.strip() for line in examples.splitlines()]


def command(app: typer.Typer, name: str | None = None, *, panel: str | None = None) -> Callable[[Function], Function]:
    """Add a function to a group as a command; the end of its docstring, after `Examples:`, ends its help."""

    def add(function: Function) -> Function:
        text, examples = split_help(function)
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        shown = "\n".join(["[bold]Examples:[/bold]", *(f"  {escape(line)}" for line in examples)])
        return app.command(name, cls=Command, help=text, epilog=shown, rich_help_panel=panel)(function)

    return add
