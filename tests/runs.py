"""Runs as the commands make them, without a console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ncd_training.base.processes import Launch
from ncd_training.base.run_dir import RunDir
from ncd_training.config.schema import TrainConfig
from ncd_training.data.prepare import Setup, list_images, reopen
from ncd_training.run import train as training
from rich.console import Console

from ncd_serve.progress import Progress

SILENT = Progress(Console(quiet=True))


def ready(config: TrainConfig, *, progress: Progress = SILENT, launch: Launch | None = None) -> Setup:
    """Settings and images of a new run, checked."""
    listed = list_images(config, track=progress.track)
    return training.set_up(listed, progress=progress, launch=launch or Launch())


def again(run: RunDir) -> Setup:
    """Settings and images of an existing run."""
    return reopen(run, progress=SILENT)


def train_new(config: TrainConfig, folder: Path, *, progress: Progress = SILENT, **more: Any) -> RunDir:
    """Train into a new run directory."""
    setup = ready(config, progress=progress, **more)
    run = RunDir.create(folder, setup.config)
    training.train(setup, run, progress=progress)
    return run
