"""`export`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ncd_serve.bundle import MANIFEST
from ncd_serve.cli.console import out, progress, show_serving
from ncd_serve.cli.options import note_newer_generation, run_or_newest
from ncd_serve.contract import Precision
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.places import ExportPlace, export_place

if TYPE_CHECKING:
    from ncd_serve.bundle import Bundle


class ServedOn(str, Enum):
    """Hardware that the model's config.pbtxt is written for."""

    CPU = "cpu"
    CUDA = "cuda"
    TENSORRT = "tensorrt"


def export(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run, or a bundle to serve as it is; default: the newest run."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--out", help="The bundle's folder; default RUN/bundle.")] = None,
    repository: Annotated[
        Path | None,
        typer.Option(help="Triton model repository to add the model to; default: the last one, else model_repository."),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="The model's name there; default: the last one, else the run's, ncd_global for datasets."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint of the run; default: the newest.")] = None,
    precision: Annotated[
        Precision, typer.Option(help="fp16 is for GPUs, int8 for CPUs; both are compared with fp32.")
    ] = Precision.FP32,
    min_agreement: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Smallest share of images with the same cluster as in fp32.")
    ] = 0.98,
    device: Annotated[
        ServedOn, typer.Option(help="Device that serves the model; cuda and tensorrt need NVIDIA's Triton container.")
    ] = ServedOn.CPU,
    cores: Annotated[
        int | None,
        typer.Option(min=1, help="Cores of the machine that serves it on a CPU; default: those of this machine."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the newest version instead of adding one.")
    ] = False,
    keep: Annotated[int | None, typer.Option(min=1, help="Remove all versions but the newest N.")] = None,
    replace_model: Annotated[
        bool, typer.Option("--replace-model", help="Take over a model that has the clusters of another run.")
    ] = False,
) -> None:
    """Export a run to a verified ONNX bundle and add it to a Triton model repository.

    Examples:
        ncd-serve export
        ncd-serve export runs/birds --precision int8
        ncd-serve export runs/birds --repository models --keep 3
    """
    if run and (run / MANIFEST).is_file():
        if output or checkpoint or precision is not Precision.FP32:
            raise UsageError("--out, --checkpoint and --precision are for runs", hint="export the run once more")
        usual = export_place(run)
        place = ExportPlace(repository or usual.repository, model_name or usual.model)
        _publish(run, place, device=device, cores=cores, replace=replace, keep=keep, replace_model=replace_model)
        return
    with needs_extra("train"):
        from ncd_training.api import open_run

        bundle = open_run(run_or_newest(run), progress=progress).export(
            out=output,
            repository=repository,
            model_name=model_name,
            checkpoint=checkpoint,
            precision=precision,
            min_agreement=min_agreement,
            device=device.value,
            cores=cores,
            replace=replace,
            keep=keep,
            replace_model=replace_model,
        )
    found = bundle.verification()
    out.print(
        f"verified on {found['images']} images, batches of {', '.join(map(str, found['batch_sizes']))}: "
        f"{found['equal_ids']:.1%} equal cluster ids, "
        f"largest difference {max(found['max_difference'].values()):.1e}",
        highlight=False,
        soft_wrap=True,
    )
    if agreement := found["agreement"]:
        calibrated = f"; calibrated on {agreement['calibrated_on']} others" if agreement["calibrated_on"] else ""
        out.print(
            f"{agreement['precision']}: {agreement['equal_ids']:.1%} of {agreement['images']} images keep the cluster "
            f"of fp32{calibrated}",
            highlight=False,
            soft_wrap=True,
        )
    note_newer_generation(bundle.folder)
    place = export_place(bundle.folder)
    version = max((place.repository / place.model).glob("[0-9]*"), key=lambda folder: int(folder.name))
    _show_place(bundle, version, place)


def _publish(
    folder: Path,
    place: ExportPlace,
    *,
    device: ServedOn,
    cores: int | None,
    replace: bool,
    keep: int | None,
    replace_model: bool,
) -> None:
    """Add a bundle that exists to a repository, e.g. the next generation or an earlier one."""
    from ncd_serve.bundle import Bundle

    bundle = Bundle.read(folder)
    with needs_extra("export"):
        from ncd_export.repository import add_to_repository, check_clusters
        from ncd_export.triton_config import Hardware
    if not replace_model:
        check_clusters(place.repository, place.model, bundle.manifest.lineage)
    hardware = Hardware(device.value, cores)
    version = add_to_repository(
        bundle, place.repository, name=place.model, hardware=hardware, replace=replace, keep=keep
    )
    out.print(f"generation {bundle.manifest.generation}, {len(bundle.manifest.cluster_names)} clusters")
    note_newer_generation(folder)
    _show_place(bundle, version, place)


def _show_place(bundle: Bundle, version: Path, place: ExportPlace) -> None:
    out.print(
        f"bundle: [bold]{escape(str(bundle.folder))}[/bold]\ndigest: {bundle.digest}\n"
        f"model:  [bold]{escape(str(version))}[/bold]",
        highlight=False,
        soft_wrap=True,
    )
    show_serving(place.repository)
