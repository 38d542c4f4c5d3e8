"""Predictions of the exported branch for a list of images."""

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
Floats = NDArray[np.float32]
# Observer of the outputs of all branches for each batch, e.g. `pair_quality.PairProbe`.
See = Callable[[list[BranchOutput]], None]


@dataclass(frozen=True)
class Outputs:
    """Predictions of the exported branch for a list of images."""

    clusters: int  # number of clusters of the head
    trunk: Floats  # [N, d] means of the trunk maps over their places: no branch has changed them
    embedding: Floats
    known_ids: Ids
    nearest_known: Ids  # known class with the highest logit, 0 if there is none; the head may have novel classes, too
    cluster_ids: Ids
    confidences: Floats


class EvalImages(Dataset[torch.Tensor]):
    """Images with the preprocessing of the served model: uint8 [3, H, W]."""

    def __init__(self, paths: Sequence[Path], spec: PreprocessSpec) -> None:
        self._paths, self._spec = paths, spec

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one image."""
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
    """Return the first branch's embeddings and decisions for image files; `see` gets the outputs of all branches."""
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
        # Parts are large and are not kept.
        found = model.branches[0].tail.mean_of(maps), *decisions(outputs[0], known=model.branches[0].known)
        rows.append(tuple(tensor.cpu() for tensor in found))
    model.train(was_training)
    columns = [torch.cat(column).numpy() for column in zip(*rows, strict=True)]
    return Outputs(outputs[0].cluster_logits.shape[1], *columns)


def decisions(output: BranchOutput, *, known: int) -> tuple[torch.Tensor, ...]:
    """Return the columns of `Outputs` after `trunk`, on the model's device; `known` is the number of known classes."""
    logits = output.known_logits
    confidences, cluster_ids = output.cluster_logits.softmax(dim=1).max(dim=1)
    nearest = logits[:, :known].argmax(1) if known else torch.zeros_like(cluster_ids)
    return output.embedding, logits.argmax(1), nearest, cluster_ids, confidences
