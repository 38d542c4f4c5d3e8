"""Progress where there is no terminal to draw on."""

import io

import pytest
from ncd_training import progress
from rich.console import Console


def test_off_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_SECONDS", -1)
    said = io.StringIO()
    items = list(progress.on(Console(file=said))(range(4), "counting", 4))
    assert items == [0, 1, 2, 3]
    assert said.getvalue().splitlines()[2] == "counting: 50% after 0 min"


def test_short_work_off_a_terminal_is_silent() -> None:
    said = io.StringIO()
    list(progress.on(Console(file=said))(range(4), "counting", 4))
    assert said.getvalue() == ""
