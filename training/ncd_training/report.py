"""What a person sees of a run: the plan, the epochs as they pass, the curves, the final scores."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ncd_serve.files import atomic_path
from ncd_training.manifest import KNOWN_TEST, UNLABELLED_TRAIN
from ncd_training.run_dir import RunDir

_LINES_OFF_TERMINAL = 10


class EpochDisplay:
    """A bar with the latest figures on a terminal; about ten plain lines elsewhere."""

    def __init__(self, console: Console, *, epochs: int, done: int) -> None:
        self._console, self._epochs = console, epochs
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=epochs, completed=done)

    def show(self, row: Mapping[str, Any]) -> None:
        """One epoch has passed."""
        figures = "  ".join(f"{name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
        self._progress.update(self._task, completed=row["epoch"], description=figures)
        every = max(1, self._epochs // _LINES_OFF_TERMINAL)
        if not self._console.is_terminal and (row["epoch"] % every == 0 or row["epoch"] == self._epochs):
            self._console.print(f"epoch {row['epoch']}/{self._epochs}  {figures}", soft_wrap=True, highlight=False)

    def __enter__(self) -> EpochDisplay:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Stop drawing, whatever happened."""
        self._progress.stop()


def headlines(summary: Mapping[str, Any]) -> list[str]:
    """ACC on the unlabelled images and what it has to beat; nothing where no true classes are known."""
    if UNLABELLED_TRAIN not in summary["scores"]:
        return []
    scores = {**summary["baselines"], "dual-branch model": summary["scores"][UNLABELLED_TRAIN]}
    return [f"ACC {score['acc']:.3f} on {UNLABELLED_TRAIN}: {name}" for name, score in scores.items()]


def scores_table(summary: Mapping[str, Any]) -> Table:
    """Final scores with the names of their splits, baselines first."""
    table = Table("what", "split", "images", "ACC", "NMI", "ARI", title="scores", title_justify="left")
    for name, score in summary["baselines"].items():
        table.add_row(name, UNLABELLED_TRAIN, *_cells(score))
    for split, score in summary["scores"].items():
        table.add_row("known head" if split == KNOWN_TEST else "cluster head", split, *_cells(score))
    return table


def draw_curves(run: RunDir) -> None:
    """Loss terms, and ACC where true classes are known, over the epochs: plots/curves.png."""
    rows = run.read_metrics()
    names = [name for name, value in rows[-1].items() if isinstance(value, float) and name not in _QUALITY]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in names:
        left.plot([row["epoch"] for row in rows], [row.get(name, float("nan")) for row in rows], label=name)
    left.set(title="terms of the objective", xlabel="epoch", yscale="log")
    for name in _QUALITY:
        points = [(row["epoch"], row[name]) for row in rows if name in row]
        if points:
            right.plot(*zip(*points, strict=True), marker=".", label=name)
    right.set(title="unlabelled training images", xlabel="epoch", ylim=(0, 1.02))
    for axes in (left, right):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    with atomic_path(run.plots / "curves.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


_QUALITY = ("acc", "balance")


def _cells(score: Mapping[str, float]) -> list[str]:
    return [f"{score['images']:,}", *(f"{score[name]:.3f}" if name in score else "-" for name in ("acc", "nmi", "ari"))]
