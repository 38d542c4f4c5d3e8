"""Views of the training images for the loop: decoded and augmented on the fly, or trunk maps from a cache."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ncd_serve.preprocess import open_image
from ncd_training.augment import build_augmentation, smallest_part
from ncd_training.onnx_trunk import weights_digest
from ncd_training.randomness import Purpose, seed_for
from ncd_training.ranks import Ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from ncd_training.config import DataConfig
    from ncd_training.dual_branch import Trunk
    from ncd_training.progress import Track

_CACHE_BATCH = 16


@dataclass(frozen=True)
class ViewRequest:
    """One image, and one seed for each view wanted of it."""

    index: int
    seeds: tuple[int, ...]


class FileViews(Dataset[list[Tensor]]):
    """Views made from files: uint8 [3, H, W] each."""

    def __init__(self, paths: Sequence[Path], data: DataConfig) -> None:
        self._paths = paths
        self._augment = build_augmentation(data.augmentation, data.resolution)
        # A view that shows half of the area needs a shorter side that is longer than the view's by sqrt(2).
        self._at_least = math.ceil(data.resolution / math.sqrt(smallest_part(data.augmentation)))

    def only(self, rows: NDArray[np.int64]) -> FileViews:
        """The same of some of the images, counted from 0."""
        chosen = copy(self)
        chosen._paths = [self._paths[row] for row in rows]
        return chosen

    def __getitem__(self, request: ViewRequest) -> list[Tensor]:
        """The requested views of one image."""
        image = open_image(self._paths[request.index], at_least=self._at_least)
        return [self._view(image, seed) for seed in request.seeds]

    def _view(self, image: Image, seed: int) -> Tensor:
        # Nothing else draws from the default generator, so it can be set without being restored.
        torch.default_generator.manual_seed(seed)
        return self._augment(image)


class CachedViews(Dataset[list[Tensor]]):
    """Views whose trunk maps were computed beforehand: float16 [images, K, ...] in a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        self._maps: NDArray[np.float16] = np.load(path, mmap_mode="r")
        self._rows = np.arange(len(self._maps))

    def only(self, rows: NDArray[np.int64]) -> CachedViews:
        """The same of some of the images, counted from 0."""
        chosen = copy(self)
        chosen._rows = self._rows[rows]
        return chosen

    def __getitems__(self, requests: list[ViewRequest]) -> list[Tensor]:
        """The requested views of a batch, one tensor for each view; two views of an image are never the same one."""
        rows = self._rows[[request.index for request in requests]]
        choices = np.array([self._choose(request.seeds) for request in requests])
        return [torch.from_numpy(self._maps[rows, column]).float() for column in choices.T]

    def _choose(self, seeds: tuple[int, ...]) -> NDArray[np.int64]:
        return np.random.default_rng(seeds[0]).permutation(self._maps.shape[1])[: len(seeds)]


@dataclass
class BatchPlan(Sampler[list[ViewRequest]]):
    """Which images, and which views of them, make up each batch of an epoch.

    An epoch is one pass over the labelled images; the unlabelled ones are cycled beside them. Where batches have no
    labelled images, it is one pass over the unlabelled ones.
    """

    labelled: int
    unlabelled: int
    labelled_batch: int
    unlabelled_batch: int
    seed: int
    views: int = 2
    epoch: int = 0

    def __len__(self) -> int:
        """Batches in an epoch; images left over at its end wait for the next order."""
        if not self.labelled_batch:
            return max(1, self.unlabelled // self.unlabelled_batch)
        return max(1, self.labelled // self.labelled_batch)

    def __iter__(self) -> Iterator[list[ViewRequest]]:
        """The batches of the current epoch."""
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
    """The part of each batch that one of several training processes loads."""

    plan: BatchPlan
    ranks: Ranks

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[list[ViewRequest]]:
        """This process's part of each batch of the current epoch."""
        return map(self.ranks.share, self.plan)


def batches(
    views: FileViews | CachedViews,
    plan: BatchPlan | list[list[ViewRequest]],
    *,
    workers: int,
    ranks: Ranks | None = None,
) -> DataLoader[list[Tensor]]:
    """The loader of an epoch after another (set `plan.epoch` before each), or of a given list of batches."""
    sampler = Share(plan, ranks) if ranks is not None and isinstance(plan, BatchPlan) else plan
    if isinstance(views, CachedViews):
        return DataLoader(views, batch_sampler=sampler, collate_fn=lambda stacked: stacked)
    return DataLoader(views, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def cache_views(
    trunk: Trunk, paths: Sequence[Path], data: DataConfig, *, folder: Path, track: Track, ranks: Ranks | None = None
) -> CachedViews:
    """Compute the trunk's maps of `data.cache_views` views of every image, unless the same were computed before.

    Which views these are does not depend on a run's seed, so that runs with several seeds can share them. Of several
    training processes, those of a machine compute its file together.
    """
    ranks = ranks or Ranks()
    target = ranks.own_folder(folder) / f"views-{_fingerprint(trunk, paths, data)}.npy"
    with ranks.one_file(target) as unfinished:
        if unfinished is not None:
            requests = [ViewRequest(index, _cache_seeds(index, data.cache_views)) for index in range(len(paths))]
            views = FileViews(paths, data)
            _write_maps(trunk, views, requests, unfinished, workers=data.workers, track=track, ranks=ranks)
    return CachedViews(target)


def cache_bytes(trunk: Trunk, images: int, data: DataConfig) -> int:
    """How large the cache will be."""
    return images * data.cache_views * view_bytes(trunk, data.resolution)


def view_bytes(trunk: Trunk, resolution: int) -> int:
    """How large a cached view is, in float16."""
    return math.prod(_map_shape(trunk, resolution)) * 2


@torch.no_grad()
def _write_maps(
    trunk: Trunk,
    views: FileViews,
    requests: list[ViewRequest],
    target: Path,
    *,
    workers: int,
    track: Track,
    ranks: Ranks,
) -> None:
    """This process's part of the file. Whole batches: what else is in its batch may change a map's last bits."""
    device = trunk.mean.device
    shape = (len(requests), len(requests[0].seeds), *_map_shape(trunk, views[requests[0]][0].shape[-1]))
    groups = [requests[start : start + _CACHE_BATCH] for start in range(0, len(requests), _CACHE_BATCH)]
    start, mine = ranks.local_part(groups)
    with target.open("r+b") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "<f2", "fortran_order": False, "shape": shape})
        stream.seek(start * _CACHE_BATCH * math.prod(shape[1:]) * 2, os.SEEK_CUR)
        loader = DataLoader(views, batch_sampler=mine, num_workers=workers)
        for stacked in track(loader, "caching trunk views", len(loader)):
            images = torch.stack(stacked, dim=1)
            maps = trunk.maps(images.flatten(0, 1).to(device, memory_format=torch.channels_last)).half().cpu()
            stream.write(maps.contiguous().numpy().tobytes())


@torch.no_grad()
def _map_shape(trunk: Trunk, resolution: int) -> tuple[int, ...]:
    blank = torch.zeros(1, 3, resolution, resolution, dtype=torch.uint8, device=trunk.mean.device)
    return tuple(trunk(blank).shape[1:])


def _fingerprint(trunk: Trunk, paths: Sequence[Path], data: DataConfig) -> str:
    settings = data.augmentation, data.resolution, data.cache_views, trunk.in_onnx is not None, weights_digest(trunk)
    digest = sha256(json.dumps(settings).encode())
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:20]


def _cache_seeds(index: int, views: int) -> tuple[int, ...]:
    return tuple(seed_for(Purpose.CACHED_VIEW, index, view) for view in range(views))


def _cycle(rng: np.random.Generator, images: int, wanted: int) -> NDArray[np.int64]:
    """`wanted` image numbers: shuffled passes over all of them, one after another."""
    passes = [rng.permutation(images) for _ in range(math.ceil(wanted / images) if wanted else 1)]
    return np.concatenate(passes)[:wanted]


def _part(indices: NDArray[np.int64], step: int, steps: int) -> NDArray[np.int64]:
    size = len(indices) // steps
    return indices[step * size : (step + 1) * size]
