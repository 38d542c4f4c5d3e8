"""Augmented views of the training images, and their batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ncd_serve.preprocess import open_image
from ncd_training.base.distributed import Ranks
from ncd_training.base.randomness import Purpose, seed_for
from ncd_training.base.vision import v2

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor
    from typing_extensions import Self

    from ncd_training.config.schema import DataConfig

    Augmentation = Callable[[Image], Tensor]


@dataclass(frozen=True)
class ViewRequest:
    """Request for views of one image: its index, and one seed for each view."""

    index: int
    seeds: tuple[int, ...]


class Views(Dataset[list[Tensor]]):
    """Base class of datasets of views, indexed by `ViewRequest`."""

    whole_batches = False  # True: `__getitems__` returns a batch, one tensor for each view, without worker processes

    def only(self, rows: NDArray[np.int64]) -> Self:
        """Return the same views for the images in `rows`, renumbered from 0."""
        raise NotImplementedError


class FileViews(Views):
    """Views decoded from files: uint8 [3, H, W] each."""

    def __init__(self, paths: Sequence[Path], data: DataConfig) -> None:
        self._paths = paths
        self._augment = build_augmentation(data.augmentation, data.resolution)
        # A view that shows half of the area needs a shorter side that is longer than the view's by sqrt(2).
        self._at_least = math.ceil(data.resolution / math.sqrt(smallest_part(data.augmentation)))

    def only(self, rows: NDArray[np.int64]) -> Self:
        """Return the same views for the images in `rows`, renumbered from 0."""
        chosen = copy(self)
        chosen._paths = [self._paths[row] for row in rows]
        return chosen

    def __getitem__(self, request: ViewRequest) -> list[Tensor]:
        """Return the requested views of one image."""
        image = open_image(self._paths[request.index], at_least=self._at_least)
        return [self._view(image, seed) for seed in request.seeds]

    def _view(self, image: Image, seed: int) -> Tensor:
        # Nothing else draws from the default generator, so there is no need to restore its state.
        torch.default_generator.manual_seed(seed)
        return self._augment(image)


@dataclass
class BatchPlan(Sampler[list[ViewRequest]]):
    """Batches of an epoch as lists of images and seeds of their views.

    An epoch is one pass over the labelled images; the unlabelled images are cycled alongside. If batches hold no
    labelled images, an epoch is one pass over the unlabelled images.
    """

    labelled: int
    unlabelled: int
    labelled_batch: int
    unlabelled_batch: int
    seed: int
    views: int = 2
    epoch: int = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch; images that do not fill a batch are skipped in this epoch."""
        if not self.labelled_batch:
            return max(1, self.unlabelled // self.unlabelled_batch)
        return max(1, self.labelled // self.labelled_batch)

    def __iter__(self) -> Iterator[list[ViewRequest]]:
        """Yield the batches of the current epoch."""
        rng = np.random.default_rng([self.seed, Purpose.ORDER, self.epoch])
        known = _cycle(rng, self.labelled, len(self) * self.labelled_batch)
        novel = _cycle(rng, self.unlabelled, len(self) * self.unlabelled_batch) + self.labelled
        for step in range(len(self)):
            indices = np.concatenate([_part(known, step, len(self)), _part(novel, step, len(self))])
            yield [self._request(int(index)) for index in indices]

    def _request(self, index: int) -> ViewRequest:
        parts = (self.seed, Purpose.VIEW, self.epoch, index)
        return ViewRequest(index, tuple(seed_for(*parts, view) for view in range(self.views)))


@dataclass(frozen=True)
class Share(Sampler[list[ViewRequest]]):
    """Part of each batch that one of several training processes loads."""

    plan: BatchPlan
    ranks: Ranks

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[list[ViewRequest]]:
        """Return an iterator over this process's part of each batch of the current epoch."""
        return map(self.ranks.share, self.plan)


def batches(
    views: Views,
    plan: BatchPlan | list[list[ViewRequest]],
    *,
    workers: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> DataLoader[list[Tensor]]:
    """Return a loader of one epoch after another (set `plan.epoch` before each), or of a given list of batches.

    Batches for a GPU are in pinned memory, from which they are copied while the GPU computes.
    """
    sampler = Share(plan, ranks) if ranks is not None and isinstance(plan, BatchPlan) else plan
    pinned = device.type == "cuda"
    if views.whole_batches:
        return DataLoader(views, batch_sampler=sampler, collate_fn=lambda stacked: stacked, pin_memory=pinned)
    return DataLoader(
        views, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0, pin_memory=pinned
    )


def _cycle(rng: np.random.Generator, images: int, wanted: int) -> NDArray[np.int64]:
    """Return `wanted` image numbers: shuffled passes over all images, one after another."""
    passes = [rng.permutation(images) for _ in range(math.ceil(wanted / images) if wanted else 1)]
    return np.concatenate(passes)[:wanted]


def _part(indices: NDArray[np.int64], step: int, steps: int) -> NDArray[np.int64]:
    size = len(indices) // steps
    return indices[step * size : (step + 1) * size]


def build_augmentation(name: str, resolution: int) -> Augmentation:
    """Return a function from a PIL image to one random view, uint8 [3, resolution, resolution].

    Random numbers come from torch's default generator.
    """
    augmentation: Augmentation = v2.Compose(_STEPS[name](resolution))
    return augmentation


def smallest_part(name: str) -> float:
    """Return the smallest fraction of an image's area that a view may show; it limits the size to decode at."""
    return _SMALLEST_PART.get(name, 1.0)


def _crop(resolution: int) -> list[v2.Transform]:
    """Return transforms for photographs, as in the paper: random crop of at least half the image, random mirroring."""
    scale = (_SMALLEST_PART["crop"], 1.0)
    return [v2.RandomResizedCrop(resolution, scale=scale), v2.RandomHorizontalFlip(), v2.PILToTensor()]


def _moco(resolution: int) -> list[v2.Transform]:
    """Return transforms of MoCo v2: small crops, strong colour changes, blur, so that views share only content."""
    kernel = max(3, resolution // 10 | 1)  # odd, a tenth of the side
    return [
        v2.RandomResizedCrop(resolution, scale=(_SMALLEST_PART["moco"], 1.0)),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(0.2),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
        v2.RandomApply([v2.GaussianBlur(kernel, sigma=(0.1, 2.0))], p=0.5),
    ]


def _shift(padding_mode: str) -> Callable[[int], list[v2.Transform]]:
    """Return transforms for small images: shift by up to an eighth of the side (4 of 32 px), random mirroring."""

    def steps(resolution: int) -> list[v2.Transform]:
        return [
            v2.Resize((resolution, resolution)),
            v2.RandomCrop(resolution, padding=resolution // 8, padding_mode=padding_mode),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]

    return steps


def _glyph(resolution: int) -> list[v2.Transform]:
    """Return transforms for characters, which keep their orientation and are never mirrored."""
    return [
        v2.Resize((resolution, resolution)),
        v2.RandomAffine(6, (0.05, 0.05), (0.9, 1.1), 5, interpolation=v2.InterpolationMode.BILINEAR),
        v2.ColorJitter(0.4, 0.4, 0.4),
        v2.PILToTensor(),
        v2.RandomChannelPermutation(),
    ]


_SMALLEST_PART = {"crop": 0.5, "moco": 0.2}
_STEPS: dict[str, Callable[[int], list[v2.Transform]]] = {
    "crop": _crop,
    "glyph": _glyph,
    "cifar10": _shift("reflect"),
    "cifar100": _shift("constant"),
    "moco": _moco,
}
