"""How good a clustering is. True novel classes are used here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch.utils.data import DataLoader, Dataset

from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_training.dual_branch import BranchOutput, DualBranchModel
from ncd_training.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN, Manifest
from ncd_training.progress import Track

Ids = NDArray[np.int64]
Scores = dict[str, float]
_PIXEL_SIDE = 32


@dataclass(frozen=True)
class Outputs:
    """What the exported branch says of a list of images."""

    embedding: NDArray[np.float32]
    known_ids: Ids
    cluster_ids: Ids


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


def cluster_accuracy(predicted: Ids, true: Ids) -> float:
    """ACC: share of images that are right under the best one-to-one matching of clusters and classes (Hungarian)."""
    size = int(max(predicted.max(), true.max())) + 1
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (predicted, true), 1)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / len(true))


def cluster_scores(predicted: Ids, true: Ids) -> Scores:
    """ACC, NMI and ARI."""
    return {
        "images": len(true),
        "acc": cluster_accuracy(predicted, true),
        "nmi": float(normalized_mutual_info_score(true, predicted)),
        "ari": float(adjusted_rand_score(true, predicted)),
    }


def cluster_balance(predicted: Ids, clusters: int) -> float:
    """Entropy of the cluster sizes over its maximum: 1 when all are equally large, 0 when all images are in one."""
    shares = np.bincount(predicted, minlength=clusters) / len(predicted)
    present = shares[shares > 0]
    return float(-(present * np.log(present)).sum() / np.log(clusters))


@torch.no_grad()
def run_model(
    model: DualBranchModel, paths: Sequence[Path], spec: PreprocessSpec, *, workers: int, track: Track, what: str
) -> Outputs:
    """The first branch's embeddings and decisions for image files."""
    device = model.trunk.mean.device
    was_training = model.training
    model.eval()
    loader = DataLoader(EvalImages(paths, spec), batch_size=64, num_workers=workers)
    outputs: list[BranchOutput] = [
        model.branches[0](model.trunk(images.to(device))) for images in track(loader, what, len(loader))
    ]
    model.train(was_training)
    return Outputs(
        embedding=torch.cat([output.embedding for output in outputs]).cpu().numpy(),
        known_ids=torch.cat([output.known_logits.argmax(1) for output in outputs]).cpu().numpy(),
        cluster_ids=torch.cat([output.cluster_logits.argmax(1) for output in outputs]).cpu().numpy(),
    )


def evaluate_splits(
    model: DualBranchModel, manifest: Manifest, spec: PreprocessSpec, *, workers: int, track: Track
) -> dict[str, Scores]:
    """Scores of every split that has true classes, by the split's name."""
    scores: dict[str, Scores] = {}

    def outputs(paths: Sequence[Path], split: str) -> Outputs:
        return run_model(model, paths, spec, workers=workers, track=track, what=f"evaluating {split}")

    if manifest.truth is not None:
        ids = outputs(manifest.unlabelled, UNLABELLED_TRAIN).cluster_ids
        scores[UNLABELLED_TRAIN] = cluster_scores(ids, np.array(manifest.truth))
    if manifest.novel_test:
        paths, truth = zip(*manifest.novel_test, strict=True)
        scores[NOVEL_TEST] = cluster_scores(outputs(paths, NOVEL_TEST).cluster_ids, np.array(truth))
    if manifest.known_test:
        paths, truth = zip(*manifest.known_test, strict=True)
        right = outputs(paths, KNOWN_TEST).known_ids == np.array(truth)
        scores[KNOWN_TEST] = {"images": len(right), "acc": float(right.mean())}
    return scores


def kmeans_ids(features: NDArray[np.float32], clusters: int, *, seed: int) -> Ids:
    """Cluster ids of plain k-means, best of 10 starts."""
    ids: Ids = KMeans(clusters, n_init=10, random_state=seed).fit_predict(features)
    return ids


def raw_pixels(paths: Sequence[Path]) -> NDArray[np.float32]:
    """Images as rows of pixel values, shrunk to 32 px where they are larger."""
    spec = PreprocessSpec(resolution=_PIXEL_SIDE, resize=_PIXEL_SIDE)
    return np.stack([load_array(path, spec).ravel() for path in paths]).astype(np.float32) / 255
