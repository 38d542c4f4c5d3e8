"""What is shown while a run trains: on a terminal, elsewhere, and in the log."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from ncd_training.summary.figures import PAIRS, QUALITY, TERMS, grouped
from ncd_training.summary.live import EpochDisplay, RunLog, duration, figures_table
from rich.console import Console

from ncd_serve.errors import DataError
from ncd_serve.progress import Progress

LOOKED = {
    "pairwise_global": 0.5,
    "balance": 0.25,  # a term of the objective, not how even the clusters are
    "cluster_balance": 0.75,
    "acc": 0.625,
    "pseudo_global_precision": 0.125,
}


def rows(epochs: int, *, every: int = 1) -> list[dict[str, Any]]:
    return [
        {"epoch": epoch, **(LOOKED if epoch % every == 0 else {"pairwise_global": 0.5})}
        for epoch in range(1, epochs + 1)
    ]


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=100, color_system=None), stream


def test_figures_by_group() -> None:
    assert grouped({"epoch": 3, **LOOKED}) == {
        TERMS: {"pairwise_global": 0.5, "balance": 0.25},
        QUALITY: {"balance": 0.75, "ACC": 0.625},
        PAIRS: {"global precision": 0.125},
    }


@pytest.mark.parametrize(("width", "epochs"), [(100, "14 16 18 20 22 24 26 27"), (60, "22 24 26 27"), (30, "27")])
def test_the_table_holds_the_latest_looks_and_the_newest_epoch(width: int, epochs: str) -> None:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(figures_table(rows(27, every=2), width=width))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].split() == ["epoch", *epochs.split()]
    assert all(len(line) <= width for line in lines)


def test_before_the_first_epoch_there_is_no_figure() -> None:
    assert figures_table([], width=80).row_count == 0


def run_display(screen: Console, log: RunLog, *, epochs: int, done: int = 0) -> None:
    passed = rows(epochs)
    with log, EpochDisplay(Progress(screen), log, epochs=epochs, steps=3, rows=passed[:done]) as display:
        for row in passed[done:]:
            assert list(display.steps("abc")) == ["a", "b", "c"]
            display.show(row)


def test_ten_lines_off_a_terminal_and_every_epoch_in_the_log(tmp_path: Path) -> None:
    screen, stream = console(terminal=False)
    run_display(screen, RunLog(tmp_path / "log.txt", screen), epochs=20)
    printed = stream.getvalue().splitlines()
    assert len(printed) == 10
    assert printed[0].startswith("epoch 2/20  0 s left  pairwise_global 0.500  balance 0.250  ")
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split()[3] for line in logged] == [f"{epoch}/20" for epoch in range(1, 21)]


def test_a_terminal_gets_a_table_and_the_log_stays_plain(tmp_path: Path) -> None:
    screen, stream = console(terminal=True)
    run_display(screen, RunLog(tmp_path / "log.txt", screen), epochs=3, done=1)
    assert "pairwise_global" in stream.getvalue()
    log = (tmp_path / "log.txt").read_text()
    assert "\x1b" not in log
    assert [line for line in log.splitlines() if "epoch 1/3" in line] == []
    assert len([line for line in log.splitlines() if "left  pairwise_global 0.500" in line]) == 2


def test_the_log_is_appended_to_and_ends_with_the_cause(tmp_path: Path) -> None:
    screen, stream = console(terminal=False)
    path = tmp_path / "log.txt"
    with RunLog(path, screen):
        screen.print("[bold]first[/bold]", "words")
    with pytest.raises(DataError), RunLog(path, screen):
        raise DataError("no images", hint="look elsewhere")
    with pytest.raises(KeyboardInterrupt), RunLog(path, screen):
        raise KeyboardInterrupt
    screen.print("not the run's")
    lines = [line.split("  ", 1)[1] for line in path.read_text().splitlines()]
    assert lines == [
        "first words",
        "ended by DataError: no images",
        "hint: look elsewhere",
        "ended by KeyboardInterrupt",
    ]
    assert stream.getvalue().splitlines() == ["first words", "not the run's"]


def test_a_process_that_does_not_lead_logs_nothing() -> None:
    screen, _ = console(terminal=False)
    with RunLog(None, screen) as log:
        screen.print("something")
        log.write("something else")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (3599, "1 h 0 min"), (12_000, "3 h 20 min"), (200_000, "2 days 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
