"""`assign --engine ray`: rows of very many images, from the workers of a Ray cluster, in a folder of Parquet files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from rich.progress import track

from ncd_serve.cli.console import messages, say
from ncd_serve.cli.extras import needs
from ncd_serve.errors import DataError, UsageError
from ncd_serve.runners import Device

BLOCK = 1000  # images: some seconds of work, and a file that is worth opening
_QUIET_SECONDS = 60
_STATUSES = ("ok", "unsure", "error")


def assign_in_bulk(
    images: list[str],
    bundle: Path,
    *,
    output: str | None,
    resume: bool,
    top_k: int,
    min_confidence: float,
    allow_urls: bool,
    device: Device,
    block: int,
    workers: int | None,
    address: str | None,
) -> None:
    """Plan, or take up the plan that the folder has; then do what is left of it."""
    if output is None:
        raise UsageError("--engine ray needs an --out", hint="add --out FOLDER")
    with needs("ray"):
        from ncd_serve.bulk import ray_engine as engine
    from ncd_serve.bulk.blocks import cut
    from ncd_serve.bulk.parts import Order, check_folder, finished, remove_leftovers, write_plan
    from ncd_serve.bulk.storage import Folder
    from ncd_serve.bundle import Bundle

    opened, folder = Bundle.read(bundle), Folder(output)
    asked = {"top_k": top_k, "min_confidence": min_confidence, "block": block, "allow_urls": allow_urls}
    order = Order.of(opened.manifest, sources=images, **asked)
    plan = check_folder(folder, order, resume=resume)
    if plan is None:
        plan = write_plan(folder, order, cut(images, size=block, allow_urls=allow_urls))
    before = len(finished(folder))
    if before == plan.blocks:
        say(f"{folder} is complete already")
        return
    counts: Counter[str] = Counter()
    with engine.cluster(address):
        most, device = engine.room(device)
        say(f"blocks: {plan.blocks - before}, workers: {workers or most} ({device.value})")
        with closing(engine.run(plan, folder, opened, workers=workers or most, device=device)) as parts:
            _watch(parts, counts, before, plan.blocks)
    remove_leftovers(folder)
    _sum_up(counts, folder, before, plan.blocks, left=plan.blocks - len(finished(folder)))


def _sum_up(counts: Counter[str], folder: object, before: int, total: int, left: int) -> None:
    if left:
        raise DataError(
            f"{left} of {total} blocks could not be done: their workers died again and again",
            hint="the others are kept; --resume tries these again; a smaller --block in a new --out narrows it down",
        )
    parts = [f"{before} parts from before"] if before else []
    parts += [f"{counts[status]} {status}" for status in _STATUSES if counts[status]]
    say(f"{total} parts in {folder} ({', '.join(parts)})")


def _watch(parts: Iterable[Counter[str]], counts: Counter[str], before: int, total: int) -> None:
    watched = track(
        _told(parts, counts, before, total),
        "assigning",
        total=total,
        completed=before,
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    )
    try:
        for rows in watched:
            counts.update(rows)
    except BaseException:
        if counts:
            say(f"{counts.total()} rows are kept: --resume goes on")
        raise


def _told(parts: Iterable[Counter[str]], counts: Counter[str], before: int, total: int) -> Iterator[Counter[str]]:
    """The parts; where no bar can be drawn, a line a minute tells how far they are."""
    said = time.monotonic()
    for number, part in enumerate(parts, start=before + 1):
        yield part
        if not messages.is_terminal and time.monotonic() - said > _QUIET_SECONDS:
            said = time.monotonic()
            say(f"{number} of {total} blocks, {counts.total()} rows")
