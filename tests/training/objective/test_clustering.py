"""Clusters in the known classes' geometry, on numbers worked by hand and problems with a known answer."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ncd_training.objective.clustering import (
    _MAX_EXACT_COLUMNS,
    balanced_assignment,
    class_whitening,
    consensus_assignment,
    discovered_assignment,
    kmeans_ids,
    linked_assignment,
    main_directions,
    refined_assignment,
    sizes_look_equal,
)
from ncd_training.score.metrics import cluster_accuracy


def test_whitening_by_hand() -> None:
    # two classes around (0, 0) and (9, 9), each +-2 along x and +-1 along y: within-class variances 4 and 1
    around = torch.tensor([[2.0, 1.0], [2.0, -1.0], [-2.0, 1.0], [-2.0, -1.0]])
    features, labels = torch.cat([around, around + 9.0]), torch.tensor([0] * 4 + [1] * 4)
    plain = class_whitening(features, labels, shrinkage=0.0)
    torch.testing.assert_close(plain, torch.diag(torch.tensor([0.5, 1.0])))
    # half way to the mean variance 2.5: variances 3.25 and 1.75
    half = class_whitening(features, labels, shrinkage=0.5)
    torch.testing.assert_close(half, torch.diag(torch.tensor([3.25, 1.75]).rsqrt()))


def test_main_directions_are_unit_rows_of_the_widest_components() -> None:
    torch.manual_seed(0)
    features = torch.randn(200, 3) * torch.tensor([5.0, 0.01, 3.0])
    reduced = main_directions(features, 2)
    assert reduced.shape == (200, 2)
    torch.testing.assert_close(reduced.norm(dim=1), torch.ones(200))
    centred = F.normalize((features - features.mean(0))[:, [0, 2]], dim=1)
    torch.testing.assert_close(reduced @ reduced.T, centred @ centred.T, atol=0.05, rtol=0)


def test_a_balanced_assignment_uses_all_clusters_alike() -> None:
    scores = torch.tensor([[0.9, 0.85], [0.9, 0.8], [0.9, 0.75], [0.9, 0.7]])  # all prefer the first
    shares = balanced_assignment(scores, temperature=0.1)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(4))
    assert shares.argmax(dim=1).tolist() == [1, 1, 0, 0]


def test_an_assignment_with_sizes_by_hand() -> None:
    # exp(0.1 / 0.1) = e: without sizes the columns weigh e + e and 1 + 1, so three quarters in the first is 3 to 1
    shares = balanced_assignment(torch.tensor([[0.1, 0.0]] * 4), temperature=0.1, sizes=torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(shares, torch.tensor([[0.75, 0.25]] * 4))


def test_anchors_count_for_the_centre_of_their_class() -> None:
    rows = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    shares = [
        refined_assignment(rows, torch.eye(2), temperature=0.1, rounds=1, equal=False, anchors=anchors)
        for anchors in (0.0, torch.tensor([[0.6, -0.8], [0.0, 0.0]]))
    ]
    # Without anchors each row is its own centre; with one, the first centre is (0.6, 0.8) + (0.6, -0.8), first axis:
    # the first row's cosines are 0.6 to it and 0.8 to the other centre.
    assert [found.argmax(dim=1).tolist() for found in shares] == [[0, 1], [1, 1]]


def test_the_variation_of_sizes_by_hand() -> None:
    # sizes 6, 4: mean 5, standard deviation 1, which is 0.2 of the mean; 8, 2: 0.6 of it
    assert sizes_look_equal(torch.tensor([0] * 6 + [1] * 4), 2)
    assert not sizes_look_equal(torch.tensor([0] * 8 + [1] * 2), 2)
    assert not sizes_look_equal(torch.zeros(3).long(), 2)


def test_clusters_have_any_size_where_classes_do() -> None:
    directions, all_truth = blobs(per_class=60, classes=6)
    kept = np.concatenate([np.flatnonzero(all_truth == number)[: 60 >> number] for number in range(6)])
    rows, truth = directions[kept], all_truth[kept]
    shares = discovered_assignment([rows, rows], 6, equal=False, temperature=0.1, starts=4, seed=0)
    assert cluster_accuracy(shares.argmax(dim=1).numpy(), truth) >= 0.98
    assert not sizes_look_equal(shares.argmax(dim=1), 6)
    # who says that these classes are equally large is believed
    told = discovered_assignment([rows, rows], 6, equal=True, temperature=0.1, starts=4, seed=0)
    assert torch.bincount(told.argmax(dim=1)).max() < torch.bincount(shares.argmax(dim=1)).max()
    linked = linked_assignment([directions], 6, temperature=0.1, starts=4, seed=0)
    assert sizes_look_equal(linked.argmax(dim=1), 6)
    assert cluster_accuracy(linked.argmax(dim=1).numpy(), all_truth) >= 0.98


def test_of_many_images_a_sample_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncd_training.objective.clustering._LINKED_IMAGES", (50, 60))
    directions, truth = blobs(per_class=60)
    shares = linked_assignment([directions], 5, temperature=0.1, starts=4, seed=0)
    assert cluster_accuracy(shares.argmax(dim=1).numpy(), truth) == 1.0


def blobs(per_class: int = 30, classes: int = 5, dim: int = 16) -> tuple[torch.Tensor, np.ndarray]:
    torch.manual_seed(0)
    centres = torch.randn(classes, dim)
    truth = np.repeat(np.arange(classes), per_class)
    return F.normalize(centres[torch.from_numpy(truth)] + 0.3 * torch.randn(len(truth), dim), dim=1), truth


def test_the_consensus_finds_what_is_there() -> None:
    directions, truth = blobs()
    shares = consensus_assignment([directions, directions], 5, temperature=0.1, starts=3, seed=0)
    assert cluster_accuracy(shares.argmax(dim=1).numpy(), truth) == 1.0
    again = refined_assignment(directions, shares, temperature=0.1)
    assert torch.equal(again.argmax(dim=1), shares.argmax(dim=1))


def test_the_shortcut_for_many_clusters_agrees_with_the_exact_way(monkeypatch: pytest.MonkeyPatch) -> None:
    directions, truth = blobs(per_class=8, classes=40, dim=24)
    shares = []
    for columns in (_MAX_EXACT_COLUMNS, 0):
        monkeypatch.setattr("ncd_training.objective.clustering._MAX_EXACT_COLUMNS", columns)
        shares.append(consensus_assignment([directions], 40, temperature=0.1, starts=8, seed=0))
    ids = [found.argmax(dim=1).numpy() for found in shares]
    assert cluster_accuracy(*ids) >= 0.98
    assert min(cluster_accuracy(found, truth) for found in ids) >= 0.98


def consensus_of_many(clusters: int, starts: int) -> tuple[float, float]:
    """Accuracy, and megabytes that the peak memory of this process has grown by."""
    directions, truth = blobs(per_class=3, classes=clusters, dim=32)
    before = peak_megabytes()
    shares = consensus_assignment([directions], clusters, temperature=0.1, starts=starts, seed=0)
    return cluster_accuracy(shares.argmax(dim=1).numpy(), truth), peak_megabytes() - before


def peak_megabytes() -> float:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


# The exact way would take about 36 bytes for each pair of columns: 640 MB.
def test_the_consensus_of_many_clusters_fits_into_memory() -> None:
    clusters, starts = 300, 14
    assert clusters * starts > _MAX_EXACT_COLUMNS
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        accuracy, grown = process.submit(consensus_of_many, clusters, starts).result()
    assert accuracy >= 0.98 and grown < 150  # MB


def test_rows_that_are_all_alike_make_one_cluster_without_a_warning() -> None:
    assert set(kmeans_ids(np.ones((9, 4), np.float32), 3, seed=0)) == {0}
