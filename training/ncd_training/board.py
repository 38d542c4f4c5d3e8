"""A run's figures for TensorBoard, which is an optional extra: import this module only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ncd_training.report import grouped


@contextmanager
def tensorboard(folder: Path, *, epochs_done: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield what writes an epoch's row. Epochs after `epochs_done` that an interrupted run left there are dropped."""
    writer = SummaryWriter(folder, purge_step=epochs_done + 1)

    def write(row: Mapping[str, Any]) -> None:
        for group, figures in grouped(row).items():
            for name, value in figures.items():
                writer.add_scalar(f"{group}/{name}", value, row["epoch"])
        writer.flush()

    try:
        yield write
    finally:
        writer.close()
