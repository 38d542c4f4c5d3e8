"""The systems that the paper compares with, each behind the same interface as the paper's own (`objective.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ncd_training.objective.dtc import DeepTransferClustering
from ncd_training.objective.dual import Objective
from ncd_training.objective.kcl_mcl import PairLearning
from ncd_training.objective.kmeans import KMeansCentres
from ncd_training.objective.orca import Orca

if TYPE_CHECKING:
    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import DualBranchModel
    from ncd_training.objective.method import Method


def build_method(config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Method:
    """The method that the configuration names, for so many unlabelled images and clusters."""
    name = config.method.name
    if name == "dtc":
        return DeepTransferClustering(config.method, config.loss, images=images, clusters=clusters)
    if name in ("kcl", "mcl"):
        return PairLearning(model.branches[0].tail, model.dim, config.method, images=images)
    if name == "orca":
        return Orca(config.method)
    if name == "kmeans":
        return KMeansCentres()
    return _objective(config, model.dim, images=images, clusters=clusters)  # RankStat is a recipe of it


def _objective(config: TrainConfig, dim: int, *, images: int, clusters: int) -> Objective:
    objective = Objective(
        dim,
        model=config.model,
        labels=config.pseudo_labels,
        loss=config.loss,
        own_labels=config.self_labels,
        compat=config.compat,
    )
    if config.self_labels.weight:
        objective.targets = torch.zeros(images, clusters)
    return objective
