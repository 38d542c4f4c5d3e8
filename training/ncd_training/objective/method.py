"""What sets one system of discovery apart from another. Data, trunk, loop, checkpoint, scores and export they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ncd_training.base.randomness import Purpose, seed_for
from ncd_training.data.views import ViewRequest, Views, batches
from ncd_training.model.branches import Modules

if TYPE_CHECKING:
    from ncd_serve.progress import Track
    from ncd_training.config.schema import BranchKind, TrainConfig
    from ncd_training.model.branches import Branch, BranchOutput
    from ncd_training.objective.pseudo_labels import PseudoLabels
    from ncd_training.run.state import TrainState

_BATCH = 256


@dataclass(frozen=True)
class Material:
    """All that a method may look at: never the true classes of unlabelled images."""

    views: Views  # of the labelled images, then of the unlabelled ones
    labels: Tensor
    unlabelled: Sequence[Path]
    config: TrainConfig
    track: Track
    kept: Path | None = None  # where epochs of stages before discovery are kept

    @property
    def unlabelled_rows(self) -> range:
        """Where the unlabelled images are among all of them."""
        return range(len(self.labels), len(self.labels) + len(self.unlabelled))


class Batch(NamedTuple):
    """What every branch made of two views of some images, labelled ones first."""

    first: list[BranchOutput]
    second: list[BranchOutput]
    labels: Tensor  # [N], of the first N images
    rows: Tensor  # [M], which unlabelled images the others are
    ramp: float  # grows from 0 to 1 as the run warms up (Eq. 10)


class Method(nn.Module):
    """Terms of a batch, and what is done around them. What it must keep is buffers."""

    def __init__(self, kinds: Sequence[BranchKind] = ("global",)) -> None:
        super().__init__()
        self.kinds = list(kinds)
        # Judges of pairs whose quality a report may show, one for each branch.
        self.pseudo_labels: Modules[PseudoLabels] = Modules()

    def before_training(self, state: TrainState, material: Material) -> None:
        """Once, on the features that training starts from; the first checkpoint has what comes of it."""

    def before_epoch(self, state: TrainState, material: Material) -> None:
        """Again and again, e.g. to make targets anew. Must come to the same on every rank and after a resume."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The terms by name; their sum is minimised."""
        raise NotImplementedError

    def remember(self, batch: Batch, *, branches: Modules[Branch], generator: torch.Generator) -> None:
        """Keep what later steps need of this one."""

    def branch_name(self, number: int) -> str:
        """`global`, `local`, or `global2` for the second of a kind."""
        earlier = self.kinds[:number].count(self.kinds[number])
        return f"{self.kinds[number]}{earlier + 1 if earlier else ''}"


@torch.no_grad()
def mean_over_views(
    state: TrainState, material: Material, rows: Sequence[int], see: Callable[[Tensor], list[Tensor]], *, views: int
) -> list[Tensor]:
    """What `see` makes of the trunk maps of some images, on average over some views of them: [rows, ...] each."""
    config = material.config
    requests = [
        ViewRequest(
            row,
            tuple(seed_for(config.optim.seed, Purpose.SELF_LABELS, state.epoch, row, view) for view in range(views)),
        )
        for row in rows
    ]
    chunks = [requests[start : start + _BATCH] for start in range(0, len(requests), _BATCH)]
    state.model.eval()
    found = []
    for stacked in batches(material.views, chunks, workers=config.data.workers, device=state.model.device):
        sights = [see(state.model.to_maps(state.model.placed(view))) for view in stacked]
        found.append([torch.stack(same).mean(dim=0).float().cpu() for same in zip(*sights, strict=True)])
    return [torch.cat(column) for column in zip(*found, strict=True)]
