"""`demo`: the whole workflow on embedded data, each step by the command that a user would type."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ncd_serve.cli.console import messages, out
from ncd_serve.errors import UsageError, needs_extra

_IMAGES_PER_CLASS = 3
_START_SECONDS = 120


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for all output.")] = Path("ncd-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the drawn images and of all random choices.")] = 0,
) -> None:
    """Train, evaluate, export, look, serve and query on images drawn here: nothing to download.

    Examples:
        ncd-serve demo
        ncd-serve demo --out /tmp/ncd-demo --seed 1
    """
    from ncd_serve.triton import TritonServer, find_triton

    with needs_extra("train"):
        from ncd_training.data.datasets.glyphs import write_glyphs

    if folder.exists():
        raise UsageError(f"{folder} already exists", hint=f"rm -r {folder}, or give another --out")
    find_triton()  # what would be missed at the end is better missed now
    run, repository, data = folder / "run", folder / "model_repository", folder / "data" / f"glyphs-{seed}"
    with messages.status("drawing images"):
        write_glyphs(data, seed=seed)
    _type("train", "--dataset", "glyphs", "--data-root", data, "--seed", seed, "--out", run)
    _type("evaluate", run)
    _type("export", run, "--repository", repository)
    _type("gallery", run)
    _show("serve", "--repository", repository)
    log = folder / "triton.log"
    with TritonServer(repository, log_path=log) as server:
        with messages.status("starting Triton"):
            server.wait_ready(_START_SECONDS)
        out.print(f"Triton is ready: gRPC {server.grpc_url}, HTTP {server.http_url}", highlight=False)
        images = _new_images(data)
        _type("query", *images, "--url", f"grpc://{server.grpc_url}", "--format", "table")
    out.print(
        f"\nTriton is stopped. Files: the run [bold]{run}[/bold], the bundle [bold]{run / 'bundle'}[/bold], "
        f"the model repository [bold]{repository}[/bold], Triton's log {log}.\n"
        f"Open in a browser: {run / 'gallery.html'} (look at the clusters, name them), {run / 'report.html'}\n"
        f"Try next:\n"
        f"  ncd-serve serve --repository {repository}\n"
        f"  ncd-serve assign {images[0].parent} --bundle {run / 'bundle'} --out rows.csv\n"
        f"  ncd-serve train --labelled DIR --unlabelled DIR --novel-classes N     (your own images)",
        highlight=False,
        soft_wrap=True,
    )


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


def _new_images(data: Path) -> list[Path]:
    """Return held-out images of the novel classes, which training never saw."""
    from ncd_training.data.datasets.glyphs import NOVEL

    return [path for name in NOVEL for path in sorted((data / "test" / name).iterdir())[:_IMAGES_PER_CLASS]]
