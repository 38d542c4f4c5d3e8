"""Text of strangers: what a name may be, and how names, paths and messages are written for people and programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_NAME_CHARACTERS = 200
# Control characters, line breaks, changes of direction, and halves of characters: names on disk need not be UTF-8.
_SPECIAL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_NOT_ON_A_SCREEN = re.compile(f"[{_SPECIAL}]")
_NOT_IN_A_LINE = re.compile(f"[\t\n{_SPECIAL}]")
# Types of pydantic's errors; its own messages are for programmers.
_PROBLEMS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a section with keys and values",
    "model_type": "must be a section with keys and values",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "missing": "is missing",
}
_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # a spreadsheet would compute it


def check_name(name: str) -> str:
    """Return the name of a class or a cluster; raise ValueError with the reason if it cannot be one.

    Names are lines of `labels.txt`, cells of tables, and words on a terminal.
    """
    if not name.strip():
        raise ValueError("a name cannot be empty")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"a name has at most {MAX_NAME_CHARACTERS} characters, not {len(name)}")
    if _NOT_IN_A_LINE.search(name):
        raise ValueError("a name cannot hold line breaks or control characters, and has to be UTF-8")
    return name


def labels_text(names: Iterable[str]) -> str:
    """Return the content of `labels.txt`: a name in each line, whose number is its cluster."""
    return "".join(f"{check_name(name)}\n" for name in names)


def printable(text: object) -> str:
    """Return a path or another text as valid text of one line; special characters become escapes such as `\\x1b`."""
    return _NOT_IN_A_LINE.sub(_escaped, str(text))


def first_problem(error: ValidationError, *, levels: int | None = None) -> str:
    """Return the first error of a checked file or setting in words, after its key (of at most `levels` parts)."""
    found = error.errors(include_url=False)
    key = found[0]["loc"][:levels]
    # A value that may be of several kinds has an error for each of them.
    kinds = [one for one in found if one["loc"][: len(key)] == key] if levels else found[:1]
    words = list(dict.fromkeys(map(_problem, kinds)))
    text = " or ".join([words[0], *(word.removeprefix("must be ") for word in words[1:])])
    where = ".".join(map(str, key))
    return text if not where else f"{where} {text}" if text.startswith(("must be ", "is ")) else f"{where}: {text}"


def _problem(found: Any) -> str:
    known = _PROBLEMS.get(found["type"])
    if known:
        return known.format(**found.get("ctx", {}))
    return str(found["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")


def spreadsheet_cell(text: str) -> str:
    """Return text that no spreadsheet takes for a formula, with an apostrophe before it if need be."""
    return f"'{text}" if _FORMULA.match(text) else text


def from_spreadsheet_cell(text: str) -> str:
    """Return the text of a cell that `spreadsheet_cell` wrote."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


class SafeConsole(Console):
    """Console that shows special characters of a text as escapes, so that no name or path can steer the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like any console."""
        return _safe(super().render(renderable, options))


def _safe(segments: Iterable[Segment]) -> Iterator[Segment]:
    for text, style, control in segments:
        yield Segment(text if control else _NOT_ON_A_SCREEN.sub(_escaped, text), style, control)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
