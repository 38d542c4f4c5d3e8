"""A bar on a terminal or in a notebook, a line a minute elsewhere, nothing where nothing is wanted."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ncd_serve import progress
from ncd_serve.progress import Progress


@pytest.mark.parametrize("terminal", [True, False])
def test_all_items_pass_in_order(terminal: bool) -> None:
    shown = Progress(Console(file=io.StringIO(), force_terminal=terminal))
    assert list(shown.track("abc", "spelling", 3)) == ["a", "b", "c"]


def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 10.0, 70.0, 80.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    console = Console(file=io.StringIO(), force_terminal=False)
    assert list(Progress(console).track("abc", "spelling", 4, 1)) == ["a", "b", "c"]
    assert console.file.getvalue() == "spelling: 75% after 1 min\n"  # type: ignore[attr-defined]


def test_unknown_totals_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 70.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    console = Console(file=io.StringIO(), force_terminal=False)
    list(Progress(console).track("a", "asking", None))
    assert console.file.getvalue() == "asking: 1 after 1 min\n"  # type: ignore[attr-defined]


def test_a_quiet_console_draws_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, quiet=True)
    assert list(Progress(console).track("abc", "spelling", 3)) == ["a", "b", "c"]
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_step_spins_on_a_terminal_and_is_silent_elsewhere() -> None:
    for options, shown in (
        ({"force_terminal": True}, True),
        ({}, False),
        ({"force_terminal": True, "quiet": True}, False),
    ):
        console = Console(file=io.StringIO(), **options)  # type: ignore[arg-type]
        with Progress(console).status("drawing"):
            pass
        assert ("drawing" in console.file.getvalue()) is shown  # type: ignore[attr-defined]


def test_another_process_reads_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 10.0, 10.0, 10.1, 20.0, 20.0, 30.0, 30.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    file = tmp_path / "progress.json"
    shown = Progress(Console(file=io.StringIO()), file=file)
    seen = [json.loads(file.read_bytes())["done"] for _ in shown.track("abcd", "spelling", 4)]
    assert seen == [0, 1, 1, 3], "not more often than a page is drawn"
    assert not file.exists()
    with shown.status("drawing"):
        assert json.loads(file.read_bytes()) == {"what": "drawing", "done": 0, "total": None}
    assert list(tmp_path.iterdir()) == []
