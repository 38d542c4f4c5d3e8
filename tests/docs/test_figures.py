"""Figures of the README and of the pages stand beside the command that prints them, and the command is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from ncd_serve.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
FIGURE = re.compile(r"\**-?\d[\d.,]*\**( ± [\d.]+)?( (of|to) \d[\d.]*)?( (min|s|MB|GB|ms))?")
COMMAND = re.compile(r"benchmarks/\w+\.py|ncd-serve (?:compare|evaluate)\b")


def tables_of_figures(text: str) -> list[int]:
    """Where tables start of which at least a third of the cells after the first column are figures."""
    found = []
    for table in TABLE.finditer(text):
        cells = [cell.strip() for row in table[0].splitlines()[2:] for cell in row.strip("|").split("|")[1:]]
        if cells and sum(bool(FIGURE.fullmatch(cell)) for cell in cells) * 3 >= len(cells):
            found.append(table.start())
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_figures_name_their_command(page: Path) -> None:
    text = page.read_text()
    for start in tables_of_figures(text):
        section = text[max(text.rfind("\n## ", 0, start), 0) : start]
        assert COMMAND.search(section), text[start : start + 200]


def test_commands_that_pages_name_are_there() -> None:
    named = {found for page in PAGES for found in re.findall(r"benchmarks/(\w+)\.py", page.read_text())}
    assert named == {path.stem for path in (ROOT / "benchmarks").glob("*.py")} & named and len(named) > 10


def test_commands_of_ours_that_pages_name_are_there() -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for page in PAGES:
        named = set(re.findall(r"(?:`|^\$ )ncd-serve +([a-z][\w-]*)", page.read_text(), re.MULTILINE))
        assert named <= known, (page, named - known)


def test_tables_of_figures_are_recognised() -> None:
    assert tables_of_figures((ROOT / "README.md").read_text())
    pages = [page for page in PAGES if page.parent.name == "benchmarks"]
    assert all(tables_of_figures(page.read_text()) for page in pages) and len(pages) >= 7


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 700
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target
