"""Trunk maps of images in well separated groups, and the loop of a run on them: every method must find the groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ncd_training.config.resolve import method_recipes, resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.data.views import BatchPlan, batches
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.map_cache import CachedViews
from ncd_training.model.trunk import ConvTail, TrunkParts
from ncd_training.objective.method import Material, build_method, checked, method_named
from ncd_training.run import step as run_step
from ncd_training.run.step import TrainState, train_epoch
from ncd_training.score.metrics import cluster_accuracy
from torch import nn

from ncd_serve import progress

KNOWN, NOVEL, EACH, DIM, VIEWS = 12, 3, 20, 8, 4
OWN: dict[str, dict[str, Any]] = {
    "dtc": {"method.warm_up_epochs": 5},
    "gcd": {"optim.epochs": 3, "method.starts": 2},
    "pim": {"method.iterations": 30, "method.starts": 2, "method.strengths": [0.2, 0.8]},
    "selex": {"optim.epochs": 3, "method.levels": 3},
    "simgcd": {"optim.epochs": 15},
    "uno": {"optim.epochs": 15},
}


class Blobs:
    """Trunk maps of images in well separated groups: labelled ones, then unlabelled ones.

    Those are of novel classes alone or, if `mixed`, half of the images of known classes are among them.
    """

    def __init__(self, folder: Path, *, mixed: bool = False) -> None:
        rng = np.random.default_rng(0)
        corners = np.array([[number >> bit & 1 for bit in range(DIM // 2)] for number in range(2 ** (DIM // 2))])
        centres = 3.0 * np.hstack([corners, 1 - corners])[rng.permutation(len(corners))[: KNOWN + NOVEL]]
        classes = np.repeat(np.arange(KNOWN + NOVEL), EACH)
        even = np.arange(len(classes)) % 2 == 0
        if mixed:  # all classes are equally large in the pile
            classes, even = (column[even | (classes < KNOWN)] for column in (classes, even))
        labelled = (classes < KNOWN) & (even | (not mixed))
        classes, known = classes[np.argsort(~labelled, kind="stable")], labelled.sum()
        maps = centres[classes][:, None] + 0.3 * rng.standard_normal((len(classes), VIEWS, DIM))
        path = folder / "blobs.npy"
        np.save(path, maps[..., None, None].astype(np.float16))
        self.views = CachedViews(path)
        self.labels = torch.from_numpy(classes[:known])
        self.truth = classes[known:] if mixed else classes[known:] - KNOWN
        self.pile = torch.from_numpy(maps[known:, 0]).float()[..., None, None]


def blob_config(method: str, **more: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "data.novel_classes": NOVEL,
        "data.workers": 0,
        "data.resolution": 32,
        "data.resize": 32,
        "supervised.epochs": 0,
        "similarity.epochs": 30 if method in ("kcl", "mcl") else 0,
        "similarity.batch": 40,
        "optim.epochs": 30 if method_named(method).has_epochs else 0,
        "optim.learning_rate": 1e-2 if method in ("kcl", "mcl") else 0.05,
        "optim.labelled_batch": 0 if method in ("dtc", "kcl", "mcl") else 32,
        "optim.unlabelled_batch": 32,
        "optim.batch_by_size": False,
        "loss.consistency_weight": 1.0,
        **OWN.get(method, {}),
        "model.dictionary_size": 64,
        # Corners share half of their coordinates or more: a soft score would call different blobs half alike.
        "pseudo_labels.hard": True,
        "pseudo_labels.global_top_k": 4,
        "pseudo_labels.local_top_k": 10,
    }
    return checked(resolve_config(recipes=method_recipes(method), overrides={**settings, **more}))


def blob_state(config: TrainConfig, images: int = NOVEL * EACH) -> TrainState:
    torch.manual_seed(0)
    tail = ConvTail(nn.Conv2d(DIM, DIM, 1), nn.ReLU())
    with torch.no_grad():
        tail.stages[0].weight.copy_(torch.eye(DIM)[..., None, None])
    parts = TrunkParts(nn.Identity(), nn.Identity(), tail, DIM)
    model = DualBranchModel(parts, known=KNOWN, novel=NOVEL, model=config.model)
    method = build_method(config, model, images=images, clusters=NOVEL)
    return TrainState(model, method, run_step.build_optimizer(model, method, config.optim))


@torch.no_grad()
def blob_accuracy(state: TrainState, blobs: Blobs) -> float:
    state.model.eval()
    ids = state.model.branches[0](blobs.pile).cluster_logits.argmax(dim=1).numpy()
    return cluster_accuracy(ids, blobs.truth)


def trained(config: TrainConfig, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> TrainState:
    """The loop of a real run on maps that are there already."""
    images = len(blobs.truth)
    state = blob_state(config, images)
    material = Material(blobs.views, blobs.labels, [Path()] * images, config, progress.silent)
    if config.method.name == "kmeans":
        monkeypatch.setattr("ncd_training.objective.kmeans.run_model", lambda *_, **__: Seen(blobs.pile))
    optim = config.optim
    plan = BatchPlan(len(blobs.labels), images, optim.labelled_batch, optim.unlabelled_batch, seed=optim.seed)
    loader = batches(blobs.views, plan, workers=0, device=state.model.device)
    state.method.before_training(state.model, material)
    while state.epoch < optim.epochs:
        state.method.before_epoch(state.model, state.epoch, material)
        train_epoch(state, loader, plan, blobs.labels, config)
        state.method.after_epoch(state.model, state.epoch, material)
    return state


def discover(config: TrainConfig, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> float:
    return blob_accuracy(trained(config, blobs, monkeypatch), blobs)


class Seen:
    """What the model would make of image files."""

    def __init__(self, maps: torch.Tensor) -> None:
        self.embedding = maps.flatten(1).numpy()
