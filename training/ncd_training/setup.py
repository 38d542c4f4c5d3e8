"""What a run needs to know before anything heavy is imported or done: its settings and its images, both checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ncd_serve.errors import UsageError
from ncd_training import progress
from ncd_training.datasets import load_manifest
from ncd_training.scan import scan

if TYPE_CHECKING:
    from rich.console import Console

    from ncd_training.config import TrainConfig
    from ncd_training.manifest import Manifest


@dataclass(frozen=True)
class Setup:
    """A configuration with its images looked at, and the place to report to."""

    config: TrainConfig
    manifest: Manifest
    console: Console

    @property
    def track(self) -> progress.Track:
        """Progress bars on the console."""
        return progress.on(self.console)

    @property
    def labels(self) -> list[int]:
        """Class numbers of the labelled images."""
        return [label for _, label in self.manifest.labelled]

    @property
    def clusters(self) -> int:
        """Number of novel classes, filled in by `prepare`."""
        assert self.config.data.novel_classes is not None
        return self.config.data.novel_classes


def prepare(config: TrainConfig, console: Console) -> Setup:
    """Find and look at everything that a run needs."""
    manifest = load_manifest(config.data)
    clusters = config.data.novel_classes or manifest.novel_classes
    if clusters is None:
        raise UsageError("how many novel classes are there?", hint="give --novel-classes N")
    manifest, bad = scan(manifest, track=progress.on(console))
    for path, reason in bad.items():
        console.print(f"skipped {path}: {reason}", style="yellow", markup=False, soft_wrap=True, highlight=False)
    manifest.check(clusters)
    data = config.data.model_copy(update={"novel_classes": clusters})
    return Setup(config.model_copy(update={"data": data}), manifest, console)
