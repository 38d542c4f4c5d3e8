"""Comparison from start to end: images, runs, table, tests of differences, page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ncd_serve.progress import Progress
from ncd_training.data.manifest import UNLABELLED_TRAIN, Manifest
from ncd_training.data.prepare import list_images
from ncd_training.study.compare import Job, Ledger, Wishes, check_jobs, departures, plan_jobs, run_all
from ncd_training.study.compare_page import write_page
from ncd_training.study.compare_rows import Row, RowSet
from ncd_training.study.compare_table import Comparison, collect
from ncd_training.study.piles import Cell, write_pile
from ncd_training.study.significance import Graded, graded, resample
from ncd_training.summary.live import duration

_TESTED = (
    "`against` is the difference of ACC on unlabelled-train in points, by one matching over all images, with its 95% "
    "interval from a paired bootstrap over {drawn}; * marks a real difference (0 is outside)."
)
_ONE_SEED = "images, of one seed: other seeds may differ more"


def run_comparison(
    name: str,
    chosen: RowSet,
    labels: Sequence[str],
    seeds: Sequence[int],
    wishes: Wishes,
    folder: Path,
    *,
    progress: Progress,
    cell: Cell | None = None,
    report: str | None = None,
) -> Comparison:
    """Run the rows with these labels (none: all) for each seed; files in `folder` are updated after every run.

    `cell`: the images of each seed are a pile that is drawn from the dataset. `report`: the command, for a page.
    """
    rows = chosen.pick(labels)
    place, piles = _drawn(cell, rows[0], seeds, wishes, folder, progress) if cell else (None, {})
    jobs = plan_jobs(rows, seeds, wishes, folder, piles)
    manifest = check_jobs(jobs, progress=progress)
    comparable = cell is None or cell.name == "clean"
    title = f"{name} on {place or manifest.name}, ACC in %"
    about = [*([cell.line] if cell else []), *notes(chosen, rows, wishes, manifest, comparable=comparable)]
    ledger = Ledger(folder)

    def table() -> Comparison:
        dataset = wishes.dataset if comparable else None
        return collect(jobs, ledger, folder, title=title, dataset=dataset, notes=about)

    try:
        for job in run_all(jobs, ledger, progress=progress):
            progress.say(f"{job.name}: {outcome(job, ledger)}")
            table().write(folder)
    except (KeyboardInterrupt, SystemExit):
        progress.say(f"interrupted; run the same command again to resume (runs are in {folder})")
        raise
    found = tested(table(), jobs)
    found.write(folder)
    found.draw(folder)
    if report is not None:
        write_page(found, jobs, command=report)
    return found


def _drawn(
    cell: Cell, row: Row, seeds: Sequence[int], wishes: Wishes, folder: Path, progress: Progress
) -> tuple[str, dict[int, dict[str, Any]]]:
    """Draw the piles of a cell; return a name for all of them, and the settings of each seed."""
    whole = list_images(wishes.config(row), track=progress.track).manifest
    piles = {seed: write_pile(cell, whole, seed=seed, folder=folder) for seed in seeds}
    return f"{whole.name}, {cell.name}", piles


def tested(found: Comparison, jobs: Sequence[Job]) -> Comparison:
    """Return the table with the differences between its rows."""
    runs: dict[str, list[Graded | None]] = {}
    for job in jobs:
        runs.setdefault(job.row.label, []).append(graded(job.run) if job.finished else None)
    resampled = resample(runs)
    if resampled is None:
        return found
    seeds = max(map(len, runs.values()))
    note = _TESTED.format(drawn="images and seeds" if seeds > 1 else _ONE_SEED)
    return replace(found, resampled=resampled, notes=[*found.notes, note])


def notes(
    chosen: RowSet, rows: Sequence[Row], wishes: Wishes, manifest: Manifest, *, comparable: bool = True
) -> list[str]:
    """Return notes on the figures: departures from the paper, initial weights, meaning of the columns."""
    lines = list(manifest.notes)
    others = [f"{row.label} {row.elsewhere[wishes.dataset]}" for row in rows if wishes.dataset in row.elsewhere]
    if others:
        lines.append(f"Published, but not comparable with this table ({chosen.elsewhere}): {'; '.join(others)}.")
    if comparable and any(row.figures(wishes.dataset) for row in rows):
        changed = departures(rows, wishes)
        start = wishes.overrides.get("model.weights", wishes.flags.get("model.weights", "random weights"))
        lines += [
            f"The column `paper` was obtained with other settings (here for the paper's): {'; '.join(changed)}."
            if changed
            else "The settings are those of the paper.",
            f"The paper starts from self-supervised weights (MoCo v2 or RotNet), these runs start from {start}.",
            *filter(None, [chosen.note]),
        ]
    return [
        *lines,
        "ACC is that of the last epoch, ± the sample standard deviation over seeds. Time is the mean of a run, "
        "memory the peak of its training process, including the cached views that it read.",
    ]


def outcome(job: Job, ledger: Ledger) -> str:
    """Return the outcome of a run in a line."""
    cost = ledger[job]
    if not job.finished:
        return f"failed: {cost.error}"
    scores = job.run.read_summary().scores
    acc = f"ACC {100 * scores[UNLABELLED_TRAIN].acc:.1f} %, "
    return f"{acc}{duration(cost.seconds)}, {cost.memory / 1e9:.1f} GB"
