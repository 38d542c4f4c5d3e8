"""`compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding

from ncd_serve.cli import extras
from ncd_serve.cli.config import ConfigFile, Recipes, Settings, check_places, data_flags
from ncd_serve.cli.console import messages, out, say
from ncd_serve.cli.options import (
    CacheViews,
    DataRoot,
    Dataset,
    Labelled,
    ManifestFile,
    NovelClasses,
    StrictData,
    Unlabelled,
    Weights,
)
from ncd_serve.cli.train import cluster_number
from ncd_serve.errors import UsageError


def compare(
    rows_of: Annotated[str | None, typer.Argument(metavar="SET", help="A set of rows; --list names them.")] = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    novel_classes: NovelClasses = None,
    weights: Weights = None,
    cache_views: CacheViews = None,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: Settings = None,
    rows: Annotated[str | None, typer.Option(metavar="A,B", help="Only these rows of the set.")] = None,
    seeds: Annotated[str, typer.Option(metavar="N,N", help="Each row is run once with each of these seeds.")] = "0",
    output: Annotated[Path | None, typer.Option("--out", help="Where; default runs/<set>-<dataset>.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the sets of rows and end.")] = False,
) -> None:
    """Run methods or variants side by side, and put them in one table with the paper's figures.

    The same command goes on where an interrupted one stopped.
    """
    if list_:
        _show_sets()
        return
    if rows_of is None:
        raise UsageError("which rows?", hint="name a set, e.g. ncd-serve compare baselines; --list shows all")
    chosen = _load("study.compare_rows").row_set(rows_of)
    flags = {
        **data_flags(
            dataset=dataset,
            data_root=data_root,
            labelled=labelled,
            unlabelled=unlabelled,
            manifest=manifest,
            strict_data=strict_data,
        ),
        "data.novel_classes": cluster_number(novel_classes),
        "data.cache_views": cache_views,
        "model.weights": weights and str(weights.absolute()),
    }
    check_places(flags)
    comparing = _load("study.compare")
    wishes = comparing.Wishes(
        recipes=recipe or [],
        config_file=config,
        flags={key: value for key, value in flags.items() if value is not None},
        overrides=dict(_load("config.resolve").parse_override(text) for text in set_ or []),
    )
    picked = chosen.pick(_words(rows))
    place = dataset or (manifest and manifest.stem) or (unlabelled and unlabelled.name) or "data"
    folder = output or Path("runs") / f"{rows_of}-{place}"
    jobs = comparing.plan(picked, _seeds(seeds), wishes, folder)
    found = comparing.check(jobs, messages)
    report = _load("study.compare_table")
    notes = report.notes(chosen, picked, wishes, found)
    _run(jobs, folder, title=f"{rows_of} on {found.name}, ACC in %", dataset=dataset, notes=notes)


def _run(jobs: list[Any], folder: Path, *, title: str, dataset: str | None, notes: list[str]) -> None:
    """All runs, a line for each as it ends; the files have what is known so far."""
    comparing, report = _load("study.compare"), _load("study.compare_table")
    ledger = comparing.Ledger(folder)
    try:
        for job in comparing.run_all(jobs, ledger, messages):
            say(f"{job.name}: {report.outcome(job, ledger)}")
            report.collect(jobs, ledger, title=title, dataset=dataset, notes=notes).write(folder)
    except (KeyboardInterrupt, SystemExit):
        say(f"interrupted; the same command goes on from here (runs are in {folder})")
        raise
    table = report.collect(jobs, ledger, title=title, dataset=dataset, notes=notes)
    table.draw(folder)
    out.print(table.table(out.width))
    for line in (*table.notes, f"table: {folder}/comparison.md, comparison.csv, comparison.png"):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if table.errors:
        for line in table.errors:
            messages.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
        say("the same command tries again what failed")
        raise typer.Exit(max(1, next(ledger[job].exit_code for job in jobs if ledger[job].error)))


def _show_sets() -> None:
    """Every set: its rows, and the datasets that the paper has figures for."""
    sets = _load("study.compare_rows")
    for name in sets.set_names():
        found = sets.row_set(name)
        out.print(f"[bold]{name}[/bold]: {found.title}", highlight=False)
        out.print(Padding(f"rows: {', '.join(row.label for row in found.rows)}", (0, 2)), highlight=False)
        out.print(Padding(f"published for: {', '.join(found.datasets)}", (0, 2)), highlight=False, style="dim")


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _seeds(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise UsageError(f"cannot read --seeds {text}", hint="write different numbers with commas, e.g. --seeds 0,1,2")
    return [int(word) for word in words]


def _load(module: str) -> Any:
    return extras.load(f"ncd_training.{module}", extra="train")
