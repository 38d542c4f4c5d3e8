"""Measures of the source that reviews rely on: short functions, docstrings that begin with what a thing is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
PACKAGES = ("ncd_serve", "training/ncd_training", "export/ncd_export")
LINES = 40
QUESTION = re.compile(r"(What|How|Where|Whether|Which|Who|When)\b(?! to\b)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))


def public_docstrings(name: str, node: ast.Module | ast.ClassDef | Function) -> Iterator[tuple[str, str]]:
    """The docstring of a module, class or function, then those of the public ones in it."""
    yield name, ast.get_docstring(node) or ""
    if isinstance(node, Function):
        return
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | Function) and not inner.name.startswith("_"):
            yield from public_docstrings(f"{name}:{inner.name}", inner)


def questions() -> list[str]:
    return [
        f"{name}: {text.partition(chr(10))[0]}"
        for file, tree in modules()
        for name, text in public_docstrings(str(file), tree)
        if QUESTION.match(text)
    ]


def test_nine_of_ten_functions_fit_on_a_screen() -> None:
    functions = [node for _, tree in modules() for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    assert len(lengths) > 1000  # all three packages have been read
    assert np.percentile(lengths, 90) <= LINES


def test_questions_are_told_from_other_docstrings() -> None:
    for text in ("What a tail makes of a batch.", "Whether it ends.", "When a run began."):
        assert QUESTION.match(text)
    for text in ("How to ask.", "When to stop.", "Output of a tail.", "Whatever is left."):
        assert not QUESTION.match(text)


def test_no_public_docstring_is_a_question() -> None:
    assert questions() == []
