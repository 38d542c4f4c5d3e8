"""Cache of trunk maps: computed once for augmented views, then read from a memory-mapped file."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ncd_training.base.distributed import Ranks
from ncd_training.base.randomness import Purpose, seed_for
from ncd_training.data.views import FileViews, ViewRequest, Views
from ncd_training.model.onnx import weights_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ncd_serve.progress import Progress, Track
    from ncd_training.config.schema import DataConfig
    from ncd_training.model.branches import Trunk

_BATCH_IMAGES = 16


class CachedViews(Views):
    """Views whose trunk maps are cached: float16 [images, K, ...] in a memory-mapped file."""

    whole_batches = True

    def __init__(self, path: Path) -> None:
        self._maps: NDArray[np.float16] = np.load(path, mmap_mode="r")
        self._rows = np.arange(len(self._maps))

    def only(self, rows: NDArray[np.int64]) -> Self:
        """Return the same views for the images in `rows`, renumbered from 0."""
        chosen = copy(self)
        chosen._rows = self._rows[rows]
        return chosen

    def __getitems__(self, requests: list[ViewRequest]) -> list[Tensor]:
        """Return the requested views of a batch, one tensor for each view; the views of an image are all different."""
        rows = self._rows[[request.index for request in requests]]
        choices = np.array([self._choose(request.seeds) for request in requests])
        return [torch.from_numpy(self._maps[rows, column]).float() for column in choices.T]

    def _choose(self, seeds: tuple[int, ...]) -> NDArray[np.int64]:
        return np.random.default_rng(seeds[0]).permutation(self._maps.shape[1])[: len(seeds)]


def cache_views(
    trunk: Trunk,
    paths: Sequence[Path],
    data: DataConfig,
    *,
    folder: Path,
    progress: Progress,
    ranks: Ranks | None = None,
) -> CachedViews:
    """Compute the trunk's maps of `data.cache_views` views of every image, unless they are cached already.

    The views do not depend on the run's seed, so that runs with different seeds can share them. The training processes
    of a machine compute its file together.
    """
    assert isinstance(data.cache_views, int)  # `auto` is settled before a run starts
    ranks = ranks or Ranks()
    target = ranks.own_folder(folder) / f"views-{_fingerprint(trunk, paths, data)}.npy"
    with ranks.one_file(target) as unfinished:
        if unfinished is not None:
            size = cache_bytes(trunk, len(paths), data.cache_views, data.resolution)
            what = f"caching backbone features of {data.cache_views} views per image"
            progress.say(f"{what}: {size / 1e6:,.0f} MB in {folder}")
            requests = [ViewRequest(index, _cache_seeds(index, data.cache_views)) for index in range(len(paths))]
            views = FileViews(paths, data)
            _write_maps(trunk, views, requests, unfinished, workers=data.workers, track=progress.track, ranks=ranks)
    return CachedViews(target)


def cache_bytes(trunk: Trunk, images: int, views: int, resolution: int) -> int:
    """Return the size of the cache in bytes."""
    return images * views * view_bytes(trunk, resolution)


def view_bytes(trunk: Trunk, resolution: int) -> int:
    """Return the size of a cached view in bytes; maps are float16."""
    return math.prod(_map_shape(trunk, resolution)) * 2


def cache_room(folder: Path) -> int:
    """Return how many bytes a cache may have: half of the free disk space, and no more than the machine's memory."""
    while not folder.exists():
        folder = folder.parent
    return min(shutil.disk_usage(folder).free // 2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


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
    """Write this process's part of the file, in whole batches: the last bits of a map may depend on its batch."""
    device = trunk.mean.device
    shape = (len(requests), len(requests[0].seeds), *_map_shape(trunk, views[requests[0]][0].shape[-1]))
    groups = [requests[start : start + _BATCH_IMAGES] for start in range(0, len(requests), _BATCH_IMAGES)]
    start, own = ranks.local_part(groups)
    with target.open("r+b") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "<f2", "fortran_order": False, "shape": shape})
        stream.seek(start * _BATCH_IMAGES * math.prod(shape[1:]) * 2, os.SEEK_CUR)
        loader = DataLoader(views, batch_sampler=own, num_workers=workers)
        for stacked in track(loader, "caching backbone features", len(loader)):
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
