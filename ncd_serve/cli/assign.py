"""`assign`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import messages, out
from ncd_serve.cli.options import (
    AllowUrls,
    Digest,
    Engine,
    Form,
    Images,
    MinConfidence,
    PublicKey,
    Resume,
    TopK,
    bundle_or_newest,
)
from ncd_serve.errors import UsageError
from ncd_serve.progress import Progress
from ncd_serve.runners import Device


def assign(
    images: Images,
    bundle: Annotated[
        Path | None, typer.Option(help="A bundle or an exported run; default: the newest exported run.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--out", help="Write rows to a .csv, .jsonl or .parquet file; with Ray a folder, also by URL."),
    ] = None,
    digest: Digest = None,
    public_key: PublicKey = None,
    resume: Resume = False,
    form: Form = None,
    top_k: TopK = 3,
    min_confidence: MinConfidence = 0.0,
    allow_urls: AllowUrls = False,
    device: Annotated[
        Device, typer.Option(help="Device to compute on; auto is CUDA where it works, else the CPU.")
    ] = Device.AUTO,
    engine: Annotated[
        Engine,
        typer.Option(
            help="plain: one process. ray: many processes, on one machine or a cluster, for very many images."
        ),
    ] = Engine.PLAIN,
    block: Annotated[
        int | None, typer.Option(min=1, help="With Ray: images per output file; default 1000. Shards are not split.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With Ray: number of workers; default one for each CPU or GPU of the cluster."),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="With Ray: address of a cluster, as RAY_ADDRESS; default: start Ray on this machine."),
    ] = None,
) -> None:
    """Assign images to clusters without a server, with ONNX Runtime.

    Examples:
        ncd-serve assign new
        ncd-serve assign new --bundle runs/birds --out rows.parquet
        ncd-serve assign 's3://photos/' --bundle runs/birds --engine ray --out rows
    """
    from ncd_serve.bundle import Bundle
    from ncd_serve.rows.writing import RowOptions, print_rows, save_rows
    from ncd_serve.runners import open_bundle

    bundle, options = bundle_or_newest(bundle), RowOptions(top_k, min_confidence, allow_urls)
    progress = Progress(messages)
    load = partial(open_bundle, bundle, device=device, digest=digest, public_key=public_key, progress=progress)
    if engine is Engine.RAY:
        from ncd_serve.bulk.run import RayOptions, assign_in_bulk

        if output is None:
            raise UsageError("--engine ray needs an --out", hint="add --out FOLDER")
        opened, ray = (
            Bundle.read(bundle, digest=digest, public_key=public_key),
            RayOptions(device, block, workers, ray_address),
        )
        assign_in_bulk(images, opened, target=output, resume=resume, options=options, ray=ray, progress=progress)
    elif block or workers or ray_address:
        raise UsageError("--block, --workers and --ray-address are for Ray", hint="add --engine ray")
    elif output:
        save_rows(images, load, target=Path(output), resume=resume, options=options, progress=progress)
    elif resume:
        raise UsageError("--resume needs the --out of the interrupted run", hint="add --out FILE")
    else:
        print_rows(images, load, form=form and form.value, options=options, out=out, progress=progress)
