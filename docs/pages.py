"""Write the pages of the site into build/docs, for MkDocs: those of this folder, with the parts that are generated.

    .venv/bin/python docs/pages.py && .venv/bin/mkdocs build --strict

A line `::: commands`, `::: python` or `::: exit codes` in a page becomes that part of the reference, `::: settings FILE
NAME` a table of the fields of a section, `::: FILE NAME` the source of a function, class or constant. Where there is
none, nothing is written. Formulas become MathML, notebooks become pages with the outputs that they have.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import sys
import textwrap
from base64 import b64decode
from collections.abc import Iterator
from enum import Enum
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import latex2mathml.converter
import ncd_training
import typer
from typer.models import ArgumentInfo

import ncd_serve
from ncd_serve import errors
from ncd_serve.cli.app import app
from ncd_serve.cli.help import split_help
from ncd_serve.triton.serve import Server

PAGES = Path(__file__).resolve().parent
ROOT = PAGES.parent
DIRECTIVE = re.compile(r"^::: (.+)$", re.MULTILINE)
DISPLAYED = re.compile(r"^\$\$ (.+) \$\$$", re.MULTILINE)
ALIASES = ("ncd_serve/options.py", "training/ncd_training/api.py")  # where types of options have names
_WORDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "`true`, `false`",
    "Path": "path",
    "dict": "table",
}
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
MEMBERS = (classmethod, property, cached_property)
_TABLE = re.compile(r"<table[^>]*>(.*)</table>", re.DOTALL)
INLINE = re.compile(r"\\\((.+?)\\\)")


def main(target: Path) -> None:
    """Write all pages into a folder, which is emptied first."""
    notebooks = {notebook: as_page(notebook) for notebook in PAGES.rglob("*.ipynb")}
    filled = {page: filled_in(page.read_text()) for page in PAGES.rglob("*.md")}
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(PAGES, target, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page, text in filled.items():
        (target / page.relative_to(PAGES)).write_text(text)
    for notebook, (text, pictures) in notebooks.items():
        page = (target / notebook.relative_to(PAGES)).with_suffix(".md")
        page.write_text(text)
        for name, content in pictures.items():
            page.with_name(name).write_bytes(content)


def filled_in(markdown: str) -> str:
    """Return a page with its formulas and directives filled in."""
    markdown = DISPLAYED.sub(lambda found: f'<div class="formula">{_mathml(found[1], "block")}</div>', markdown)
    markdown = INLINE.sub(lambda found: _mathml(found[1], "inline"), markdown)
    return DIRECTIVE.sub(lambda found: expand(found[1]), markdown)


def as_page(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook with its outputs as Markdown, and its pictures by their names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}-{len(pictures) + 1}.png"
                pictures[name] = b64decode(data["image/png"])
                parts.append(f"![What the cell shows]({name})")
            elif table := _TABLE.search("".join(data.get("text/html", ""))):
                parts.append(f"<table>{table[1]}</table>")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).strip("\n"):
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _mathml(formula: str, display: str) -> str:
    # In a span: Markdown would take a line that starts with <math> for a block of its own.
    return f"<span>{latex2mathml.converter.convert(formula, display=display)}</span>"


def expand(wish: str) -> str:
    """The Markdown that a directive stands for."""
    parts = {"commands": _commands, "python": _python, "exit codes": _exit_codes}
    if wish in parts:
        return "\n".join(parts[wish]())
    if wish.startswith("settings "):
        return "\n".join(_settings(*wish.split()[1:]))
    file, _, symbol = wish.partition(" ")
    code, line = source_of(ROOT / file, symbol)
    return f"`{file}`, line {line}: `{symbol}`\n\n```python\n{code}\n```"


def source_of(file: Path, symbol: str) -> tuple[str, int]:
    """The lines of a function, class, `Class.method` or constant, and where they start."""
    if not file.is_file():
        sys.exit(f"{file} is not there")
    text = file.read_text()
    node: Any = ast.parse(text)
    for name in symbol.split("."):
        node = next((child for child in node.body if name in _names(child)), None)
        if node is None:
            sys.exit(f"{file} has no {symbol}")
    start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    lines = text.splitlines()[start - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines), start


def _names(node: Any) -> list[str]:
    targets = [target for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
    return [target.id for target in targets] or [getattr(node, "name", "")]


def _settings(file: str, name: str) -> Iterator[str]:
    """Return the fields of a section as a table: type, limits and default, and the comment in the source."""
    code, _ = source_of(ROOT / file, name)
    module = ".".join(Path(file).with_suffix("").parts[1:])
    section = getattr(import_module(module), name)
    yield f"{inspect.getdoc(section)}\n\n| setting | what it does |\n|---|---|"
    for node in ast.parse(code).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        key = ast.unparse(node.target)
        field = section.model_fields[key]
        marks = [(sign, getattr(mark, limit, None)) for mark in field.metadata for limit, sign in _LIMITS.items()]
        limits = [f"{sign} {value:,}" for sign, value in marks if value is not None]
        default = "" if field.default is None else f" *Default:* `{json.dumps(field.default)}`."
        about = f"{_comment(code.splitlines(), node)}{default}"
        yield f"| `{key}` {', '.join([_in_words(field.annotation), *limits])} | {about.strip()} |"


def _in_words(annotation: Any) -> str:
    parts = [part for part in get_args(annotation) if part not in (type(None), ...)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if get_origin(annotation) is Annotated:
        return _in_words(parts[0])
    if get_origin(annotation) is tuple:
        return f"list of {_in_words(parts[0])}s"
    kind = get_origin(annotation) or annotation
    return " or ".join(map(_in_words, parts)) if kind in (Union, UnionType) else _WORDS[kind.__name__]


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment above a field and the one after it."""
    above, number = [], node.lineno - 2
    while lines[number].strip().startswith("#"):
        above.insert(0, lines[number].strip())
        number -= 1
    after = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
    text = " ".join(part.lstrip("# ") for part in (*above, after) if part).rstrip(".").replace("|", r"\|")
    return f"{text}." if text else ""


def _commands() -> Iterator[str]:
    yield from _below(app, "ncd-serve")


def _below(group: typer.Typer, path: str) -> Iterator[str]:
    """The commands of a group, then its groups, each with arguments and options."""
    for command in group.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        yield from _command(command.callback, f"{path} {name}")
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _below(inner.typer_instance, f"{path} {inner.name}")


def _command(function: Any, path: str) -> Iterator[str]:
    parameters = list(_parameters(function))
    arguments = [one.usage for one in parameters if one.is_argument]
    text, examples = split_help(function)
    yield f"\n## {path}\n\n{text}\n"
    yield f"```text\n{' '.join([path, '[OPTIONS]', *arguments])}\n```\n"
    yield "\n".join(["Examples:\n", "```text", *examples, "```\n"])
    if parameters:
        yield "| argument or option | what it does |\n|---|---|"
    for one in parameters:
        cells = [" ".join(filter(None, [one.names, one.kind])), one.described]
        yield " | ".join(["", *(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells), ""]).strip()


class _Parameter:
    """An argument or option, from the signature of the function that takes it."""

    def __init__(self, name: str, hint: Any, default: Any) -> None:
        self._name, self._default = name, default
        self._type, self.info = get_args(hint)[:2]
        self.is_argument = isinstance(self.info, ArgumentInfo)
        self._inner = [one for one in get_args(self._type) if one is not type(None)]

    @property
    def usage(self) -> str:
        word = self.info.metavar or self._name.strip("_").upper().replace("_", "-")
        word = f"{word}..." if "list" in str(self._type) else word
        return word if self._default is inspect.Parameter.empty else f"[{word}]"

    @property
    def names(self) -> str:
        if self.is_argument:
            return f"`{self.usage}`"
        # Typer keeps the first name that it is given where other options have their default.
        given = [name for name in (self.info.default, *(self.info.param_decls or ())) if isinstance(name, str)]
        names = given or [f"--{self._name.replace('_', '-')}"]
        return ", ".join(f"`{name}`" for pair in names for name in pair.split("/"))  # --a/--no-a

    @property
    def kind(self) -> str:
        inner = self._inner[0] if self._inner else self._type
        if self.info.metavar:
            return self.info.metavar
        if inner is bool:
            return ""
        if inspect.isclass(inner) and issubclass(inner, Enum):
            return ", ".join(f"`{choice.value}`" for choice in inner)
        repeated = ", repeatable" if "list" in str(self._type) else ""
        last = get_args(inner)[0] if get_args(inner) else inner
        return _WORDS[last.__name__] + repeated

    @property
    def described(self) -> str:
        text = self.info.help or ""
        if self._default is inspect.Parameter.empty:
            return f"{text} *Required.*"
        shown = getattr(self._default, "value", self._default)
        return text if shown in (None, False) else f"{text} *Default:* `{shown}`."


def _parameters(function: Any) -> Iterator[_Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        yield _Parameter(name, hints[name], parameter.default)


def _python() -> Iterator[str]:
    """The public names of both packages, `discover` first, with their signatures and docstrings."""
    for package, more in ((ncd_training, []), (ncd_serve, [Server])):
        yield f"\n## {package.__name__}\n\n{_docstring(package)}\n"
        names = sorted(package.__all__, key=lambda name: name != "discover")
        public = [getattr(package, name) for name in names if not name.startswith("__")]
        for thing in (*public, *more):
            yield from _described(thing.__name__, thing, level=3)


def _described(name: str, thing: Any, *, level: int) -> Iterator[str]:
    yield f"\n{'#' * level} {name}\n"
    if callable(thing) and thing not in (ncd_training.Run, Server):  # which users get from functions
        yield f"```python\n{name}{_signature(thing)}\n```\n"
    yield _docstring(thing)
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, MEMBERS)):
            yield from _described(f"{name}.{member}", getattr(thing, member), level=level + 1)


def _signature(thing: Any) -> str:
    """Parameters and result as they are called, one a line where they do not fit into one line."""
    signature = inspect.signature(thing)
    parts = [_parameter(one) for name, one in signature.parameters.items() if name != "self"]
    first_named = next((n for n, one in enumerate(signature.parameters.values()) if one.kind is one.KEYWORD_ONLY), None)
    if first_named is not None:
        parts.insert(first_named - ("self" in signature.parameters), "*")
    result = _annotation(signature.return_annotation)
    arrow = f" -> {result}" if result not in ("", "None") else ""
    line = f"({', '.join(parts)}){arrow}"
    return line if len(line) < 90 else "(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    hint = _annotation(one.annotation)
    text = f"{stars}{one.name}" + (f": {hint}" if hint else "")
    if one.default is one.empty:
        return text
    default = repr(one.default.value if isinstance(one.default, Enum) else one.default)
    return f"{text} = {'...' if default.startswith('<') else default}"


def _annotation(annotation: Any) -> str:
    """A type as it is written in the source, with the names of options replaced by the types that they stand for."""
    if annotation is inspect.Parameter.empty:
        return ""
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b[A-Z]\w+\b", lambda found: _annotation(_aliases().get(found[0], "")) or found[0], text)


@cache
def _aliases() -> dict[str, str]:
    """Types that have a name of their own in options.py and api.py, e.g. `AnyPath`."""
    trees = [ast.parse((ROOT / file).read_text()) for file in ALIASES]
    assigned = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    named = {name: node.value for node in reversed(assigned) for name in _names(node) if name[:1].isupper()}
    return {name: ast.unparse(_without_help(value)) for name, value in named.items()}


def _without_help(node: ast.expr) -> ast.expr:
    is_option = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated"
    return node.slice.elts[0] if is_option else node


def _docstring(thing: Any) -> str:
    """Paragraphs as they are; an indented example becomes code and keeps the indentation of its lines."""
    blocks = (inspect.getdoc(thing) or "").split("\n\n")
    return "\n\n".join(
        f"```python\n{textwrap.dedent(block)}\n```" if block.startswith("    ") else block for block in blocks
    )


def _exit_codes() -> Iterator[str]:
    yield "| code | what it means | class in `ncd_serve.errors` |"
    yield "|---|---|---|"
    yield "| 0 | done | |"
    for kind in (errors.NcdError, *errors.NcdError.__subclasses__()):
        meaning = "A bug in ncd-serve: please report it." if kind is errors.NcdError else inspect.getdoc(kind)
        yield f"| {kind.exit_code} | {meaning} | `{kind.__name__}` |"
    yield "| 130, 143 | Interrupted, terminated. | |"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
