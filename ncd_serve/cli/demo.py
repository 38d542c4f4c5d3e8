"""`demo`: the whole workflow on drawn letters or on the user's images, each step by the command one would type."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import messages, out
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.places import export_place

_IMAGES_PER_CLASS = 3
_OWN_IMAGES = 12
_START_SECONDS = 120


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for all output.")] = Path("ncd-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the drawn images and of all random choices.")] = 0,
    own: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--images",
            metavar="KNOWN PILE",
            help="Your images instead: a folder with a folder for each known class, and a folder of unlabelled ones.",
        ),
    ] = None,
) -> None:
    """Train, export, look, serve and query, on letters drawn here or on your images: nothing to download.

    Examples:
        ncd-serve demo
        ncd-serve demo --images known pile --out birds
    """
    from ncd_serve.triton import TritonServer, find_triton

    if folder.exists():
        raise UsageError(f"{folder} already exists", hint=f"rm -r {folder}, or give another --out")
    find_triton()  # what would be missed at the end is better missed now
    run, repository = folder / "run", folder / "model_repository"
    images = _train_on_own(own, run, seed=seed) if own else _train_on_letters(folder, run, seed=seed)
    _type("export", run, "--repository", repository)
    _type("gallery", run)
    _show("serve", "--repository", repository)
    log = folder / "triton.log"
    with TritonServer(repository, log_path=log) as server:
        with messages.status("starting Triton"):
            server.wait_ready(_START_SECONDS)
        out.print(f"Triton is ready: gRPC {server.grpc_url}, HTTP {server.http_url}", highlight=False)
        where = ("--url", f"grpc://{server.grpc_url}", "--model-name", export_place(run / "bundle").model)
        _type("query", *images, *where, "--format", "table")
    _show_end(run, repository, log, images[0].parent, on_letters=own is None)


def _show_end(run: Path, repository: Path, log: Path, images: Path, *, on_letters: bool) -> None:
    more = "\n  ncd-serve demo --images KNOWN PILE --out mine     (your own images)" if on_letters else ""
    out.print(
        f"\nTriton is stopped. Files: the run [bold]{run}[/bold], the bundle [bold]{run / 'bundle'}[/bold], "
        f"the model repository [bold]{repository}[/bold], Triton's log {log}.\n"
        f"Open in a browser: {run / 'gallery.html'} (look at the clusters, name them), {run / 'report.html'}\n"
        f"Try next:\n"
        f"  ncd-serve serve --repository {repository}\n"
        f"  ncd-serve assign {images} --bundle {run / 'bundle'} --out rows.csv"
        f"{more}",
        highlight=False,
        soft_wrap=True,
    )


def _train_on_letters(folder: Path, run: Path, *, seed: int) -> list[Path]:
    """Draw letters, train on them, and return held-out images of the novel classes, which training never saw."""
    with needs_extra("train"):
        from ncd_training.data.datasets.glyphs import NOVEL, write_glyphs

    data = folder / "data" / f"glyphs-{seed}"
    with messages.status("drawing images"):
        write_glyphs(data, seed=seed)
    _type("train", "--dataset", "glyphs", "--data-root", data, "--seed", seed, "--out", run)
    _type("evaluate", run)
    return [path for name in NOVEL for path in sorted((data / "test" / name).iterdir())[:_IMAGES_PER_CLASS]]


def _train_on_own(own: tuple[Path, Path], run: Path, *, seed: int) -> list[Path]:
    """Train on the user's folders, and return some of the unlabelled images."""
    from ncd_serve.inputs.images import find_images

    known, pile = own
    some = find_images([pile])[:_OWN_IMAGES]
    _type("train", "--labelled", known, "--unlabelled", pile, "--seed", seed, "--out", run)
    return some


def _type(*words: object) -> None:
    """Run a sub-command as if it had been typed."""
    from ncd_serve.cli.app import app

    _show(*words)
    # An interrupted sub-command does not raise here: Typer hands its exit code back.
    if code := app([str(word) for word in words], standalone_mode=False):
        raise typer.Exit(code)


def _show(*words: object) -> None:
    command = shlex.join(str(word) for word in words)
    out.print(f"\n$ ncd-serve {command}", style="bold cyan", markup=False, highlight=False, soft_wrap=True)
