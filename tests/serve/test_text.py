"""What a name may be, and what becomes of names and paths that were made to hurt."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pytest
from ncd_training.data.manifest import class_folders, from_csv
from pydantic import ValidationError
from rich.table import Table

from ncd_serve.bundle import BundleManifest
from ncd_serve.errors import DataError
from ncd_serve.prediction import Prediction
from ncd_serve.rows.tables import read_rows, write_csv, write_rows
from ncd_serve.text import (
    SafeConsole,
    check_name,
    from_spreadsheet_cell,
    labels_text,
    spreadsheet_cell,
)
from tests.serve.test_naming import manifest

NOT_UTF8 = os.fsdecode(b"caf\xe9")
BAD_NAMES = ["", "  ", "a\nb", "a\0b", "a\rb", "a\x85b", "a\u2028b", "\x1b[31mred", "abc\u202efdp", NOT_UTF8, "x" * 201]
FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "'=1", "''-x", "\tx"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_a_name_cannot_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a name"):
        check_name(name)
    with pytest.raises(ValueError, match="a name"):
        labels_text(["good", name])
    about = manifest().model_dump()
    for field in ("known_classes", "cluster_names"):
        with pytest.raises(ValidationError):
            BundleManifest.model_validate({**about, field: [*about[field], name]})


@pytest.mark.parametrize("name", ["Möwe: groß", "=1+1", "鳥 🐦", "a\u200db", "[b]gull", "x" * 200, "-"])
def test_what_a_name_can_be(name: str) -> None:
    assert check_name(name) == name
    assert labels_text([name, "b"]).splitlines() == [name, "b"]


def test_class_folders_and_labels_are_checked(tmp_path: Path) -> None:
    for name in ("a\nb", NOT_UTF8):
        folder = tmp_path / name.replace("\n", "_") / "root" / name
        folder.mkdir(parents=True)
        (folder / "1.png").touch()
        with pytest.raises(DataError, match=r"class folder 'caf.udce9'|class folder 'a.nb'") as refused:
            class_folders(folder.parent)
        assert refused.value.hint == "rename the folder"
    table = tmp_path / "images.csv"
    table.write_text('path,label\nx.png,"a\nb"\ny.png,\n')
    with pytest.raises(DataError, match=r"line 3: label 'a.nb': a name cannot hold line breaks"):
        from_csv(table)


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "a\x9b31mb", "right\u202eleft", NOT_UTF8, "\r\b\x7f"])
def test_no_text_steers_the_terminal(text: str) -> None:
    console = SafeConsole(file=io.StringIO(), force_terminal=True, width=80)
    table = Table("name", title=text)
    table.add_row(text)
    for item in (text, table):
        console.print(item, markup=False)
    console.rule(text)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert text not in shown and "\x1b]" not in shown and "\u202e" not in shown and "\x07" not in shown
    assert shown.encode()  # as a terminal gets it


def test_the_console_keeps_its_own_codes_and_line_breaks() -> None:
    console = SafeConsole(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")
    console.print("[red]two\nlines[/red]")
    assert console.file.getvalue() == "\x1b[31mtwo\x1b[0m\n\x1b[31mlines\x1b[0m\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", [*FORMULAS, "plain", "'tis", "'"])
def test_cells_are_no_formulas_and_come_back_as_they_were(text: str) -> None:
    cell = spreadsheet_cell(text)
    assert cell[0] not in "=+-@\t\r" and from_spreadsheet_cell(cell) == text


def test_rows_with_formulas_survive_the_table(tmp_path: Path) -> None:
    names = ["=cmd|' /C calc'!A0", "+x", "@y", "-z", "plain"]
    rows = [Prediction(f"{name}.png", "ok", 0, name, 0.5, 0.1) for name in names]
    write_rows(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as stream:
        cells = [cell for row in list(csv.reader(stream))[1:] for cell in row]
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)
    assert read_rows(tmp_path / "rows.csv") == rows


def test_no_path_of_a_row_steers_the_terminal() -> None:
    stream = io.StringIO()
    write_csv([Prediction("\x1b[2J.png", "ok", 0, "\x1bc", 0.5, 0.1)], stream)
    assert "\x1b" not in stream.getvalue() and r"\x1b[2J.png" in stream.getvalue()
