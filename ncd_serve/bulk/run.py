"""Assign very many images on the workers of a Ray cluster; rows go to a folder of Parquet files."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ncd_serve.errors import DataError, needs_extra
from ncd_serve.rows.writing import RowOptions, summarise
from ncd_serve.runners import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ncd_serve.bulk.parts import Order, Plan
    from ncd_serve.bulk.storage import Folder
    from ncd_serve.bundle import Bundle
    from ncd_serve.progress import Progress

_DEFAULT_BLOCK_IMAGES = 1000  # a few seconds of work, and a file of a useful size


class RayOptions(NamedTuple):
    """Settings of the engine; None stands for its default."""

    device: Device = Device.AUTO
    block: int | None = None  # images to a file of rows
    workers: int | None = None  # default: one for each CPU or GPU of the cluster
    address: str | None = None  # of a cluster; default RAY_ADDRESS, else a Ray on this machine


def assign_in_bulk(
    images: Sequence[str | Path],
    bundle: Bundle,
    *,
    target: str,
    resume: bool,
    options: RowOptions,
    ray: RayOptions,
    progress: Progress,
) -> None:
    """Write the plan of the folder `target`, or read the plan that it has; then do its unfinished blocks."""
    with needs_extra("ray"):
        from ncd_serve.bulk import ray_engine as engine
        from ncd_serve.bulk.parts import Order, check_folder, finished, remove_leftovers
        from ncd_serve.bulk.storage import Folder

    folder = Folder(target)
    asked = {**vars(options), "block": ray.block or _DEFAULT_BLOCK_IMAGES}
    order = Order.of(bundle.manifest, sources=list(map(str, images)), **asked)
    plan = check_folder(folder, order, resume=resume) or _plan(folder, order)
    before = len(finished(folder))
    if before == plan.blocks:
        progress.say(f"{folder} is already complete")
        return
    counts: Counter[str] = Counter()
    with engine.cluster(ray.address):
        most, device = engine.room(ray.device)
        workers = ray.workers or most
        progress.say(f"blocks: {plan.blocks - before}, workers: {workers} ({device.value})")
        with closing(engine.run(plan, folder, bundle, workers=workers, device=device)) as parts:
            _count(progress.track(parts, "assigning", plan.blocks, before), counts, progress)
    remove_leftovers(folder)
    if left := plan.blocks - len(finished(folder)):
        raise DataError(
            f"{left} of {plan.blocks} blocks failed: their workers died repeatedly",
            hint="the others are kept; --resume retries these; a smaller --block in a new --out narrows them down",
        )
    summary = summarise(counts, f"{before} parts from before" if before else "")
    progress.say(f"{plan.blocks} parts in {folder} ({summary})")


def _plan(folder: Folder, order: Order) -> Plan:
    from ncd_serve.bulk.blocks import cut
    from ncd_serve.bulk.parts import write_plan

    return write_plan(folder, order, cut(order.sources, size=order.block, allow_urls=order.allow_urls))


def _count(parts: Iterable[Counter[str]], counts: Counter[str], progress: Progress) -> None:
    try:
        for rows in parts:
            counts.update(rows)
    except BaseException:
        if counts:
            progress.say(f"{counts.total()} rows are kept: continue with --resume")
        raise
