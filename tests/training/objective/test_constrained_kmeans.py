"""K-means with and without rows that are told their cluster."""

import numpy as np
import pytest
import torch
from ncd_training.objective.constrained_kmeans import FREE, constrained_kmeans
from ncd_training.score.metrics import cluster_accuracy
from sklearn.cluster import KMeans


def blobs(classes: int, per_class: int, dim: int, *, noise: float) -> tuple[torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    truth = np.repeat(np.arange(classes), per_class)
    centres = torch.randn(classes, dim, generator=generator)
    return centres[torch.from_numpy(truth)] + noise * torch.randn(len(truth), dim, generator=generator), truth


def free(rows: int) -> torch.Tensor:
    return torch.full((rows,), FREE)


@pytest.mark.parametrize(("classes", "dim", "noise"), [(8, 16, 1.0), (40, 64, 0.5), (40, 64, 2.0)])
def test_without_constraints_it_is_as_good_as_scikit_learn(classes: int, dim: int, noise: float) -> None:
    features, _ = blobs(classes, 15, dim, noise=noise)
    ours = constrained_kmeans(features, free(len(features)), classes, starts=10, seed=0)
    theirs = KMeans(classes, n_init=10, random_state=0).fit(features.numpy())
    assert ours.inertia <= 1.01 * theirs.inertia_
    # the inertia is that of the ids
    centred = features - features.mean(dim=0)
    np.testing.assert_allclose((centred - ours.centres[ours.ids]).square().sum(), ours.inertia, rtol=1e-4)


def test_without_constraints_separable_blobs_get_scikit_learns_labels() -> None:
    features, truth = blobs(6, 20, 8, noise=0.05)
    ours = constrained_kmeans(features, free(len(features)), 6, starts=3, seed=0).ids.numpy()
    theirs = KMeans(6, n_init=3, random_state=0).fit_predict(features.numpy())
    assert cluster_accuracy(ours, theirs.astype(np.int64)) == cluster_accuracy(ours, truth) == 1.0


def test_fixed_rows_stay_and_the_rest_settles_around_them() -> None:
    # On a line: rows 0 and 1 are told that they are one cluster though they lie apart; its centre is their mean, 5.
    features = torch.tensor([[0.0], [10.0], [4.0], [5.5], [20.0], [21.0]])
    fixed = torch.tensor([0, 0, FREE, FREE, FREE, FREE])
    found = constrained_kmeans(features, fixed, 2, starts=1, seed=0)
    assert found.ids.tolist() == [0, 0, 0, 0, 1, 1]
    # means 4.875 and 20.5: squares 23.77 + 26.27 + 0.77 + 0.39 + 0.25 + 0.25
    assert found.inertia == pytest.approx(51.6875)
    # alone, 10 would rather be with neither: three free clusters give it its own
    alone = constrained_kmeans(features, free(6), 3, starts=5, seed=0).ids
    assert alone[1] != alone[0]


def test_more_clusters_than_different_rows() -> None:
    features = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    found = constrained_kmeans(features, free(4), 3, starts=2, seed=0)
    assert found.inertia == 0.0
    assert found.ids[0] == found.ids[1] != found.ids[2] == found.ids[3]


def test_the_seed_alone_decides() -> None:
    features, _ = blobs(12, 10, 4, noise=1.0)
    first, second = (constrained_kmeans(features, free(120), 12, starts=2, seed=3) for _ in range(2))
    assert torch.equal(first.ids, second.ids)
