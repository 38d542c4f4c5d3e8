"""Trunk maps of CUB-200-2011, computed once, and tails that are trained on them: what `rounds.py` starts from."""

from __future__ import annotations

from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.map_cache import cache_views
from ncd_training.model.onnx import configured_trunk
from ncd_training.model.predict import EvalImages
from ncd_training.model.weights import initial_trunk, settle
from ncd_training.pretext import Stages
from numpy.typing import NDArray
from rich.console import Console
from torch.utils.data import DataLoader

from ncd_serve.progress import SILENT, Progress

Floats = NDArray[Any]
Ids = NDArray[Any]
RECIPE, SIDE, VIEWS = "own-images", 160, 1


def configured(console: Console) -> TrainConfig:
    """Return the settings of the recipe for own images, with smaller ones: a quarter of the work."""
    config = settle(resolve_config(recipes=[RECIPE]), images=10_000, progress=Progress(console))
    data = config.data.model_copy(update={"cache_views": VIEWS, "workers": 0, "resolution": SIDE, "resize": SIDE})
    return config.model_copy(update={"data": data})


def maps_of(data: Path, cache: Path, config: TrainConfig, console: Console) -> dict[str, Any]:
    """Return maps of all images as they are served, of augmented views of training images, classes and split."""
    names = [line.split()[1] for line in (data / "images.txt").read_text().splitlines()]
    split = np.array([int(line.split()[1]) for line in (data / "train_test_split.txt").read_text().splitlines()]) == 1
    paths = [data / "images" / name for name in names]
    parts, _ = initial_trunk(config, weights=config.model.weights_file)
    trunk, progress = DualBranchModel(parts, known=2, novel=2).trunk, Progress(console)
    trunk.in_onnx = configured_trunk(config)
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "served.npy").exists():
        loader = DataLoader(EvalImages(paths, config.data.preprocess), batch_size=16)
        maps = [trunk.maps(images).half() for images in progress.track(loader, "maps", len(loader))]
        np.save(cache / "unfinished.npy", torch.cat(maps).numpy())
        (cache / "unfinished.npy").rename(cache / "served.npy")
    training = [path for path, chosen in zip(paths, split, strict=True) if chosen]
    return {
        "served": np.load(cache / "served.npy", mmap_mode="r"),
        "views": cache_views(trunk, training, config.data, folder=cache, progress=progress),
        "classes": np.array([int(name[:3]) - 1 for name in names]),
        "train": split,
    }


class Tail:
    """Tail of the backbone, which learns classes from cached views, and features by it of the images asked about."""

    def __init__(self, data: dict[str, Any], config: TrainConfig) -> None:
        self._data = data
        model = config.model.model_copy(update={"branches": "global"})
        self._config = config.model_copy(update={"model": model})
        self._place = np.cumsum(data["train"]) - 1  # of training images among the views
        self._parts, _ = initial_trunk(config, weights=config.model.weights_file)
        self._forget()

    def copy(self) -> Tail:
        """Return a tail that can be trained on, apart from this one."""
        other = copy(self)
        other._parts = deepcopy(self._parts)
        other._forget()
        return other

    def learn(self, rows: Ids, classes: Ids, *, epochs: int, seed: int) -> None:
        """Train on images with classes, as the supervised stage of a run does."""
        torch.manual_seed(seed)
        config = self._config
        model = DualBranchModel(self._parts, known=int(classes.max()) + 1, novel=2, model=config.model)
        optim = config.optim.model_copy(update={"seed": seed})
        stage = config.supervised.model_copy(update={"epochs": epochs})
        stages = Stages(model, config.model_copy(update={"optim": optim, "supervised": stage}), SILENT.track)
        stages.supervised(self._data["views"].only(self._place[rows]), torch.from_numpy(classes))
        self._parts.tail.load_state_dict(model.branches[0].tail.state_dict())
        self._forget()

    @torch.no_grad()
    def features(self, rows: Ids) -> Floats:
        """Return features of images [N, d]; each is computed once."""
        tail, maps, last = self._parts.tail.eval(), self._data["served"], torch.channels_last
        missing = np.unique(rows[~self._done[rows]])
        for start in range(0, len(missing), 64):
            chunk = missing[start : start + 64]
            inputs = torch.from_numpy(maps[chunk].astype(np.float32)).contiguous(memory_format=last)
            self._features[chunk] = tail(inputs).embedding.numpy()
        self._done[missing] = True
        found: Floats = self._features[rows]
        return found

    def _forget(self) -> None:
        images = len(self._data["classes"])
        self._features, self._done = np.zeros((images, self._parts.dim), np.float32), np.zeros(images, bool)
