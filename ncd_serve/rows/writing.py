"""Write rows of images to a file or to the terminal, and resume a file that is not finished."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError, UsageError
from ncd_serve.inputs.sources import Images, Sources, find_sources
from ncd_serve.rows.assignment import assign_images
from ncd_serve.rows.tables import (
    check_format,
    finished_paths,
    partial_path,
    terminal_table,
    write_csv,
    write_jsonl,
    write_rows,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ncd_serve.inputs.images import Source
    from ncd_serve.prediction import Prediction
    from ncd_serve.progress import Progress
    from ncd_serve.runners import Runner

OpenRunner = Callable[[], "AbstractContextManager[Runner]"]
STATUSES = ("ok", "unsure", "error")
_MAX_CLUSTERS = 8


@dataclass
class Tally:
    """Numbers of written rows by status, cluster and fit."""

    statuses: Counter[str] = field(default_factory=Counter)
    clusters: Counter[str] = field(default_factory=Counter)
    outliers: int = 0

    def counting(self, rows: Iterable[Prediction]) -> Iterator[Prediction]:
        """Pass rows on. Whoever asks for the next row has written this one."""
        for row in rows:
            yield row
            self.statuses[row.status] += 1
            if row.cluster_name is not None:
                self.clusters[row.cluster_name] += 1
            self.outliers += row.fit == "outlier"

    def by_cluster(self) -> str:
        """Return the clusters in words, the largest first, then the images that fit nowhere."""
        shown = [f"{name} {count}" for name, count in self.clusters.most_common(_MAX_CLUSTERS)]
        if more := len(self.clusters) - len(shown):
            shown.append(f"{more} more cluster{'s' * (more > 1)}")
        return f"{', '.join(shown) or 'no image has a cluster'}; {self.outliers} outlier{'s' * (self.outliers != 1)}"


@dataclass(frozen=True)
class RowOptions:
    """Settings of the content of rows, independent of their format."""

    top_k: int = 3
    min_confidence: float = 0.0
    allow_urls: bool = False


def save_rows(
    images: Images, open_runner: OpenRunner, *, target: Path, resume: bool, options: RowOptions, progress: Progress
) -> None:
    """Write one row for each image to a .csv, .jsonl or .parquet file.

    Mistakes in the arguments are raised before the runner is opened. An interrupted call leaves its rows in a partial
    file; a call with `resume` skips the images of that file and appends the others.
    """
    if _is_complete(target, resume=resume):
        progress.say(f"{target} is already complete")
        return
    sources = find_sources(images, allow_urls=options.allow_urls)
    with open_runner() as runner:
        finished = _skip_finished(sources.images, target) if resume else 0
        tally = Tally()
        with closing(_rows(sources, runner, options)) as rows:
            shown = progress.track(tally.counting(rows), "asking", sources.total, finished)
            _keep(shown, target, finished, tally, progress)
    progress.say(f"{'the new ones: ' if finished else ''}{tally.by_cluster()}")
    progress.say(f"next: ncd-serve gallery {shlex.quote(str(target))}")


def print_rows(
    images: Images,
    open_runner: OpenRunner,
    *,
    form: str | None,
    options: RowOptions,
    out: Console,
    progress: Progress,
) -> None:
    """Print one row for each image as `table`, `csv` or `jsonl`; default: a table on a terminal and csv elsewhere."""
    sources = find_sources(images, allow_urls=options.allow_urls)
    with open_runner() as runner, closing(_rows(sources, runner, options)) as rows:
        tally = Tally()
        shown = progress.track(tally.counting(rows), "asking", sources.total)
        if form == "table" or (form is None and out.is_terminal):
            out.print(terminal_table(shown))
        else:
            (write_jsonl if form == "jsonl" else write_csv)(shown, sys.stdout)
    progress.say(tally.by_cluster())


def summarise(counts: Counter[str], before: str) -> str:
    """Return a summary of rows by status, including those from `before`."""
    parts = [before] if before else []
    return ", ".join([*parts, *(f"{counts[status]} {status}" for status in STATUSES if counts[status])])


def _rows(sources: Sources, runner: Runner, options: RowOptions) -> Generator[Prediction, None, None]:
    return assign_images(sources.images, runner, top_k=options.top_k, min_confidence=options.min_confidence)


def _is_complete(target: Path, *, resume: bool) -> bool:
    """Return whether nothing is left to resume; raise UsageError for a target that must not be written."""
    check_format(target)
    partial = partial_path(target)
    begun = partial.exists() and partial.stat().st_size > 0
    if begun and not resume:
        raise UsageError(
            f"{partial} holds rows of an unfinished run",
            hint="continue it with --resume, or remove the file to start over",
        )
    return resume and not begun and target.exists()


def _keep(rows: Iterable[Prediction], target: Path, finished: int, tally: Tally, progress: Progress) -> None:
    counts = tally.statuses
    try:
        write_rows(rows, target, resume=finished > 0)
    except BaseException:
        if kept := finished + counts.total():
            progress.say(f"{kept} rows are kept in {partial_path(target)}: continue with --resume")
        raise
    before = f"{finished} from before" if finished else ""
    progress.say(f"{finished + counts.total()} rows in {target} ({summarise(counts, before)})")


def _skip_finished(sources: Iterator[Source], target: Path) -> int:
    """Skip the images that an unfinished table has rows of, and return their number."""
    partial = partial_path(target)
    number = 0
    for number, path in enumerate(finished_paths(target) if partial.exists() else (), start=1):
        source = next(sources, None)
        if source is None or source.path != path:
            now = source.path if source else "nothing"
            raise DataError(
                f"row {number} of {partial} is {path}, but the images named now have {now} there",
                hint="name the same images in the same order, or start over with another --out",
            )
    return number
