"""`query` and `assign`: the same rows, from a Triton server or from a bundle in this process."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from ncd_serve.cli.bulk import BLOCK, assign_in_bulk
from ncd_serve.cli.console import messages, out, say
from ncd_serve.cli.options import (
    AllowUrls,
    Engine,
    Form,
    Images,
    MinConfidence,
    ModelName,
    Output,
    Resume,
    RowFormat,
    TopK,
)
from ncd_serve.errors import DataError, UsageError
from ncd_serve.inputs.images import Source
from ncd_serve.inputs.sources import Sources, find_sources
from ncd_serve.prediction import Prediction
from ncd_serve.runners import Device, Runner

_QUIET_SECONDS = 60


@dataclass(frozen=True)
class _Wanted:
    """Which rows, and where they go."""

    output: Path | None
    resume: bool
    form: RowFormat | None
    top_k: int
    min_confidence: float


def query(
    images: Images,
    url: Annotated[
        str, typer.Option(help="The Triton server: grpc://HOST:PORT or http://HOST:PORT; grpcs and https for TLS.")
    ] = "grpc://127.0.0.1:8001",
    model_name: ModelName = "ncd_global",
    output: Output = None,
    resume: Resume = False,
    form: Form = None,
    top_k: TopK = 3,
    min_confidence: MinConfidence = 0.0,
    allow_urls: AllowUrls = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer.")] = 60.0,
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds to go on trying a server that cannot be reached any more.")
    ] = 60.0,
) -> None:
    """Ask a Triton server for the cluster ids of images."""
    from ncd_serve.client.client import Client

    wanted = _Wanted(output, resume, form, top_k, min_confidence)
    sources = _plan(images, wanted, allow_urls)
    with Client(url, model=model_name, timeout=timeout, patience=patience, concurrency=concurrency) as client:
        _write(sources, client, wanted)


def assign(
    images: Images,
    bundle: Annotated[Path, typer.Option(help="A bundle that `ncd-serve export` made.")],
    output: Annotated[
        str | None,
        typer.Option("--out", help="Write rows to a .csv, .jsonl or .parquet file; with Ray a folder, also by URL."),
    ] = None,
    resume: Resume = False,
    form: Form = None,
    top_k: TopK = 3,
    min_confidence: MinConfidence = 0.0,
    allow_urls: AllowUrls = False,
    device: Annotated[
        Device, typer.Option(help="Where to compute; auto is CUDA where it works, else the CPU.")
    ] = Device.AUTO,
    engine: Annotated[
        Engine, typer.Option(help="plain: this process. ray: many, on one machine or a cluster, for very many images.")
    ] = Engine.PLAIN,
    block: Annotated[
        int | None, typer.Option(min=1, help="With Ray: images to a file of rows; default 1000. Shards stay whole.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With Ray: default one for each CPU or GPU of the cluster.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="With Ray: a cluster, as RAY_ADDRESS; default: Ray starts on this machine.")
    ] = None,
) -> None:
    """Cluster ids of images without a server, through ONNX Runtime."""
    if engine is Engine.RAY:
        assign_in_bulk(
            images,
            bundle,
            output=output,
            resume=resume,
            top_k=top_k,
            min_confidence=min_confidence,
            allow_urls=allow_urls,
            device=device,
            block=block or BLOCK,
            workers=workers,
            address=ray_address,
        )
        return
    if block or workers or ray_address:
        raise UsageError("--block, --workers and --ray-address are for Ray", hint="add --engine ray")
    from ncd_serve.bundle import Bundle
    from ncd_serve.runners import OnnxRunner

    wanted = _Wanted(Path(output) if output else None, resume, form, top_k, min_confidence)
    sources = _plan(images, wanted, allow_urls)
    runner = OnnxRunner(Bundle.read(bundle), device=device)
    _say_where(runner.provider, device)
    _write(sources, runner, wanted)


def _say_where(provider: str, device: Device) -> None:
    where = provider.removesuffix("ExecutionProvider")
    why = " (CUDA cannot be used here)" if device is Device.AUTO and where == "CPU" else ""
    say(f"ONNX Runtime runs on {where}{why}")


def _plan(images: list[str], wanted: _Wanted, allow_urls: bool) -> Sources:
    """Which images are meant; what is wrong with the command is said before anything is asked or read."""
    from ncd_serve.rows.tables import check_format, partial_path

    target, resume = wanted.output, wanted.resume
    if target is None:
        if resume:
            raise UsageError("--resume needs the --out to go on with", hint="add --out FILE")
    else:
        check_format(target)
        partial = partial_path(target)
        begun = partial.exists() and partial.stat().st_size > 0
        if begun and not resume:
            raise UsageError(f"{partial} holds rows of an unfinished run", hint="--resume goes on, rm starts over")
        if resume and not begun and target.exists():
            say(f"{target} is complete already")
            raise typer.Exit
    return find_sources(images, allow_urls=allow_urls)


def _write(sources: Sources, runner: Runner, wanted: _Wanted) -> None:
    from ncd_serve.rows.assignment import assign_images

    finished = _skip_finished(sources.images, wanted.output) if wanted.output and wanted.resume else 0
    counts: Counter[str] = Counter()
    answers = assign_images(sources.images, runner, top_k=wanted.top_k, min_confidence=wanted.min_confidence)
    with closing(answers) as rows:
        watched = track(
            _counted(rows, counts, sources.total),
            "asking",
            total=sources.total,
            completed=finished,
            console=messages,
            transient=True,
            disable=not messages.is_terminal,
        )
        if wanted.output is None:
            _print(watched, wanted.form)
        else:
            _keep(watched, wanted.output, finished, counts)


def _print(rows: Iterable[Prediction], form: RowFormat | None) -> None:
    from ncd_serve.rows.tables import terminal_table, write_csv, write_jsonl

    if form is RowFormat.TABLE or (form is None and out.is_terminal):
        out.print(terminal_table(rows))
    else:
        (write_jsonl if form is RowFormat.JSONL else write_csv)(rows, sys.stdout)


def _keep(rows: Iterable[Prediction], target: Path, finished: int, counts: Counter[str]) -> None:
    from ncd_serve.rows.tables import partial_path, write_rows

    try:
        write_rows(rows, target, resume=finished > 0)
    except BaseException:
        if kept := finished + counts.total():
            say(f"{kept} rows are kept in {partial_path(target)}: --resume goes on")
        raise
    parts = [f"{finished} from before"] if finished else []
    parts += [f"{counts[status]} {status}" for status in ("ok", "unsure", "error") if counts[status]]
    say(f"{finished + counts.total()} rows in {target} ({', '.join(parts)})")


def _counted(rows: Iterable[Prediction], counts: Counter[str], total: int | None) -> Iterator[Prediction]:
    """The rows; where no bar can be drawn, a line a minute tells how far they are."""
    said = time.monotonic()
    for row in rows:
        yield row
        counts[row.status] += 1  # whoever asks for the next row has written this one
        if not messages.is_terminal and time.monotonic() - said > _QUIET_SECONDS:
            said = time.monotonic()
            say(f"{counts.total()} rows" + (f" of {total}" if total else ""))


def _skip_finished(sources: Iterator[Source], target: Path) -> int:
    """Pass by the images that an unfinished table has rows of; their number."""
    from ncd_serve.rows.tables import finished_paths, partial_path

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
