"""`plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from ncd_serve.cli.console import messages, out

_MAX_NUMBER = 1e16  # of anything: infinity cannot be planned for


def plan(
    bundle: Annotated[Path, typer.Option(help="The bundle to be served.")],
    sample: Annotated[Path, typer.Option(help="A folder of typical images, to measure with.")],
    images_per_day: Annotated[float, typer.Option(min=1.0, max=_MAX_NUMBER, help="Images per day, e.g. 1e9.")],
    peak: Annotated[float, typer.Option(min=1.0, max=_MAX_NUMBER, help="Peak load over average load.")] = 2.0,
    utilisation: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Highest share of time that cores and GPUs may be busy.")
    ] = 0.7,
    cores: Annotated[int, typer.Option(min=1, help="Cores of a replica.")] = 8,
    gpu_rate: Annotated[
        float | None, typer.Option(min=0.1, help="Measured images per second of one GPU: plan with GPUs.")
    ] = None,
    training_images: Annotated[
        float, typer.Option(min=0.0, max=_MAX_NUMBER, help="Also plan the cached views of a training run.")
    ] = 0.0,
    views: Annotated[int, typer.Option(min=1, help="Cached views of each training image.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the hardware a deployment needs: replicas, GPUs, memory, network and disk, each with its formula.

    Examples:
        ncd-serve plan --bundle runs/birds/bundle --sample new --images-per-day 1e6
    """
    from ncd_serve.bundle import Bundle
    from ncd_serve.deploy.sizing import Demand, measure_costs, size_up
    from ncd_serve.inputs.images import find_images

    demand = Demand(images_per_day, peak, utilisation, cores, gpu_rate, training_images, views)
    opened, images = Bundle.read(bundle), find_images([sample])
    with messages.status("measuring on one core"):
        lines = size_up(demand, measure_costs(opened, images))
    if as_json:
        out.print_json(json.dumps([asdict(line) for line in lines]))
        return
    table = Table("what", Column("value", justify="right"), "", "how", "figure is")
    for line in lines:
        table.add_row(
            line.what,
            f"{line.value:,.0f}" if line.value >= 100 else f"{line.value:.3g}",
            line.unit,
            line.formula,
            line.origin,
        )
    out.print(table)
    out.print(
        "The cores of the cluster may differ from these: measure one replica there (benchmarks/serving.py) first.",
        highlight=False,
        soft_wrap=True,
    )
