"""`export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli import extras
from ncd_serve.cli.console import out
from ncd_serve.cli.options import ModelName
from ncd_serve.cli.train import open_run


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    output: Annotated[Path | None, typer.Option("--out", help="The bundle's folder; default RUN/bundle.")] = None,
    repository: Annotated[Path, typer.Option(help="Triton model repository to add it to.")] = Path("model_repository"),
    model_name: ModelName = "ncd_global",
) -> None:
    """Export a run to a verified ONNX bundle and add it to a Triton model repository."""
    run_dir, setup = open_run(run)
    exporter = extras.load("ncd_export.export", extra="train,export")
    bundle, version, verification = exporter.export_run(
        setup, run_dir, out=output or run / "bundle", repository=repository, name=model_name
    )
    out.print(
        f"verified on {verification.images} images, batches of {', '.join(map(str, verification.batch_sizes))}: "
        f"{verification.equal_ids:.1%} equal cluster ids, "
        f"largest difference {max(verification.max_difference.values()):.1e}\n"
        f"bundle: [bold]{bundle.folder}[/bold]\nmodel:  [bold]{version}[/bold]\n"
        f"next: ncd-serve serve --repository {repository}",
        highlight=False,
        soft_wrap=True,
    )
