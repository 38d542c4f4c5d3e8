"""Options that several commands share."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import say
from ncd_serve.contract import TOKEN_VARIABLE
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.options import settings_option
from ncd_serve.places import bundle_of, newest_bundle, newest_descendant, newest_run


class RowFormat(str, Enum):
    """Format of printed rows."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


class Engine(str, Enum):
    """Engine that runs a bundle."""

    PLAIN = "plain"
    RAY = "ray"


class Accelerator(str, Enum):
    """Device that trains."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Recipes = Annotated[
    list[str] | None,
    settings_option(
        "--recipe",
        metavar="NAME",
        help="Ready-made settings, may be repeated; default own-images for your own images, else the dataset's. "
        "`ncd-serve recipes` lists them.",
    ),
]
ConfigFile = Annotated[Path | None, settings_option("--config", help="A TOML file with settings.")]
MethodName = Annotated[
    str | None,
    settings_option(
        "--method",
        metavar="NAME",
        help="dual (the paper's, the default), rankstat, dtc, kcl, mcl, kmeans, orca, gcd, uno, simgcd, pim or selex.",
    ),
]
SetOptions = Annotated[
    list[str] | None, settings_option("--set", metavar="SECTION.KEY=VALUE", help="One setting; may be repeated.")
]
TrainingDevice = Annotated[
    Accelerator,
    settings_option("--device", help="Device to train on; auto is the GPU if there is one, else the CPU."),
]
ResumeRun = Annotated[Path | None, typer.Option(metavar="RUN", help="Resume an interrupted run.")]

Digest = Annotated[
    str | None, typer.Option(help="Refuse the bundle unless it has this digest, which `ncd-serve export` printed.")
]
PublicKey = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|TEXT", help="Refuse what was not signed with the secret half of this key; see `ncd-serve sign`."
    ),
]
PythonModels = Annotated[
    bool, typer.Option("--allow-python-models", help="Serve models that run code of their own, if you trust them.")
]
RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run directory; default: the newest run.", show_default=False)
]
Images = Annotated[
    list[str],
    typer.Argument(
        help="Image files, folders of them, quoted patterns, .zip and .tar[.gz|.bz2|.xz] archives; - reads a list of "
        "files from standard input."
    ),
]
AllowUrls = Annotated[bool, typer.Option("--allow-urls", help="Accept http(s) URLs as images, and fetch them.")]
Form = Annotated[
    RowFormat | None,
    typer.Option("--format", help="Format of printed rows; default: a table on a terminal, csv elsewhere."),
]
TopK = Annotated[int, typer.Option(min=1, help="Number of likeliest clusters to list for each image.")]
Output = Annotated[
    Path | None, typer.Option("--out", help="Write rows to a .csv, .jsonl or .parquet file, not the terminal.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted command with the same --out.")]
MinConfidence = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Rows with less confidence get the status `unsure`.")
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar=TOKEN_VARIABLE, show_envvar=True, help="The token that the server asks of clients.", show_default=False
    ),
]


def use_device(device: Accelerator) -> None:
    """Make training use a device. Called before torch is imported, which looks for GPUs once."""
    if device is Accelerator.CPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif device is Accelerator.CUDA:
        with needs_extra("train"):
            from ncd_training.base.precision import compute_device
        if compute_device().type != "cuda":
            raise UsageError("torch finds no GPU here", hint="ncd-serve doctor says why; or drop --device cuda")


def run_or_newest(run: Path | None) -> Path:
    """Return what was given, or the newest run, and say which that is."""
    if run is None:
        run = newest_run()
        say(f"the newest run: {run}")
    return run


def bundle_or_newest(source: Path | None) -> Path:
    """Return the bundle of a run, a bundle, or the newest exported run, and say which that is."""
    if source is not None:
        return bundle_of(source)
    bundle = newest_bundle()
    say(f"the newest bundle: {bundle}")
    return bundle


def note_newer_generation(source: Path) -> None:
    """Say so if there is a newer generation than a bundle, or that of a run."""
    bundle = source / "bundle" if (source / "bundle").is_dir() else source
    if (newest := newest_descendant(bundle)) != bundle:
        say(f"note: there is a newer generation, {newest}", style="yellow")
