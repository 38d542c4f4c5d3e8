"""Run the exported branch over a list of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.progress import Track
from ncd_training.model.branches import BranchOutput, DualBranchModel

Ids = NDArray[np.int64]
# Sees each batch as every branch does, e.g. `pair_quality.PairProbe`.
See = Callable[[list[BranchOutput]], None]


@dataclass(frozen=True)
class Outputs:
    """What the exported branch says of a list of images."""

    clusters: int  # how many there are to choose from
    embedding: NDArray[np.float32]
    known_ids: Ids
    nearest_known: Ids  # the same, where the head may say "novel", too
    cluster_ids: Ids
    confidences: NDArray[np.float32]


class EvalImages(Dataset[torch.Tensor]):
    """Images as the served model sees them: uint8 [3, H, W] through the one preprocessing."""

    def __init__(self, paths: Sequence[Path], spec: PreprocessSpec) -> None:
        self._paths, self._spec = paths, spec

    def __len__(self) -> int:
        """Number of images."""
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """One image."""
        return torch.from_numpy(load_array(self._paths[index], self._spec).copy()).permute(2, 0, 1)


@torch.no_grad()
def run_model(
    model: DualBranchModel,
    paths: Sequence[Path],
    spec: PreprocessSpec,
    *,
    workers: int,
    track: Track,
    what: str,
    see: See | None = None,
) -> Outputs:
    """The first branch's embeddings and decisions for image files; `see` is shown all branches on the way."""
    was_training = model.training
    model.eval()
    pinned = model.device.type == "cuda"
    loader = DataLoader(EvalImages(paths, spec), batch_size=64, num_workers=workers, pin_memory=pinned)
    rows: list[tuple[torch.Tensor, ...]] = []
    for images in track(loader, what, len(loader)):
        maps = model.to_maps(model.placed(images))
        outputs = [model.branches[0](maps)] if see is None else model(maps)
        if see is not None:
            see(outputs)
        # Parts are large: only what is asked for is kept.
        rows.append(tuple(tensor.cpu() for tensor in decisions(outputs[0], known=model.branches[0].known)))
    model.train(was_training)
    columns = [torch.cat(column).numpy() for column in zip(*rows, strict=True)]
    return Outputs(outputs[0].cluster_logits.shape[1], *columns)


def decisions(output: BranchOutput, *, known: int) -> tuple[torch.Tensor, ...]:
    """Columns of `Outputs` for a batch, on the model's device; `known` is the number of known classes."""
    logits = output.known_logits
    confidences, cluster_ids = output.cluster_logits.softmax(dim=1).max(dim=1)
    return output.embedding, logits.argmax(1), logits[:, :known].argmax(1), cluster_ids, confidences
