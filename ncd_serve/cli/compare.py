"""`compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from ncd_serve.cli.console import answer, out, progress, say
from ncd_serve.cli.options import Accelerator, ConfigFile, Recipes, SetOptions, TrainingDevice, use_device
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.options import (
    Backbone,
    CacheViews,
    DataRoot,
    Dataset,
    Download,
    Labelled,
    ManifestFile,
    NovelClasses,
    StrictData,
    Unlabelled,
    Weights,
)


def compare(
    rows_of: Annotated[str | None, typer.Argument(metavar="SET", help="A set of rows; --list names them.")] = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    novel_classes: NovelClasses = None,
    backbone: Backbone = None,
    weights: Weights = None,
    download: Download = False,
    cache_views: CacheViews = None,
    device: TrainingDevice = Accelerator.AUTO,
    recipe: Recipes = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    rows: Annotated[str | None, typer.Option(metavar="A,B", help="Only these rows of the set.")] = None,
    seeds: Annotated[str, typer.Option(metavar="N,N", help="Run each row once with each of these seeds.")] = "0",
    cell: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Draw realistic piles from the images: clean, tail, mixed, unknown, wild."),
    ] = None,
    foreign: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images of other things, for the cell wild.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Also write comparison.html, a page that tells all.")
    ] = False,
    out_: Annotated[Path | None, typer.Option("--out", help="Folder; default runs/<set>-<dataset>.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the available comparisons.")] = False,
) -> None:
    """Train methods or variants side by side, and put them in one table with the paper's figures.

    The same command resumes where an interrupted one stopped.

    Examples:
        ncd-serve compare --list
        ncd-serve compare baselines --dataset cub200 --recipe quick --seeds 0,1
        ncd-serve compare since-2021 --dataset cub200 --cell mixed --recipe quick --report
    """
    options = locals()
    use_device(options.pop("device"))
    with needs_extra("train"):
        if list_:
            _show_sets()
            return
        if rows_of is None:
            raise UsageError(
                "no set of rows is given", hint="name one, e.g. ncd-serve compare baselines; --list shows all"
            )
        import ncd_training.api as api

        settings, folder = options.pop("set_"), options.pop("out_")
        options |= {"rows": _words(rows), "seeds": _numbers(seeds)}
        del options["list_"]
        table = api.compare(**options, settings=settings, out=folder, progress=progress)
    out.print(table.table(out.width))
    for line in (
        *table.notes,
        f"table: {table.folder}/comparison.md, comparison.csv, comparison.png{', comparison.html' * report}",
    ):
        answer(line)
    if table.errors:
        for line in table.errors:
            progress.say(line, style="red")
        say("run the same command again to retry the failed rows")
        raise typer.Exit(table.exit_code)


def _show_sets() -> None:
    """Print every set: its rows, and the datasets that the paper has figures for."""
    from ncd_training.study.compare_rows import row_set, set_names

    for name in set_names():
        found = row_set(name)
        out.print(f"[bold]{name}[/bold]: {found.title}", highlight=False)
        out.print(Padding(f"rows: {', '.join(row.label for row in found.rows)}", (0, 2)), highlight=False)
        out.print(Padding(f"published for: {', '.join(found.datasets)}", (0, 2)), highlight=False, style="dim")


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _numbers(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise UsageError(f"cannot read --seeds {text}", hint="write different numbers with commas, e.g. --seeds 0,1,2")
    return [int(word) for word in words]
