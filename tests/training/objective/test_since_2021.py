"""Rivals since the paper: formulas on numbers worked by hand, mixed piles, and a claim of each paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ncd_training.model.branches import Branch, BranchOutput, CosineHead
from ncd_training.model.trunk import ConvTail
from ncd_training.objective.constrained_kmeans import centre_heads, class_sums, pile_ids
from ncd_training.objective.contrast import same_class, same_image
from ncd_training.objective.losses import contrastive, mutual_information, self_distillation
from ncd_training.objective.method import Batch
from ncd_training.objective.pim import PimSettings, chosen_strength, fitted
from ncd_training.objective.selex import Selex, SelexSettings, balanced_ids, distances, hierarchy, with_kept_ids
from ncd_training.objective.simgcd import SimGcd, SimGcdSettings
from ncd_training.objective.uno import Uno, UnoSettings
from ncd_training.run.step import learning_rate
from ncd_training.score.metrics import cluster_accuracy
from torch import nn

from tests.blobs import KNOWN, NOVEL, Blobs, blob_accuracy, blob_config, trained

OPEN = {"model.heads": "open_world"}


@pytest.mark.parametrize("method", ["simgcd", "uno", "gcd", "pim", "selex"])
def test_known_classes_in_the_pile_keep_their_places(
    method: str, mixed_blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = {"optim.epochs": 60, "optim.learning_rate": 0.2} if method in ("simgcd", "uno") else {}
    state = trained(blob_config(method, **OPEN, **longer), mixed_blobs, monkeypatch)
    assert blob_accuracy(state, mixed_blobs) >= 0.9
    known = mixed_blobs.truth < KNOWN
    with torch.no_grad():
        ids = state.model.branches[0](mixed_blobs.pile).cluster_logits.argmax(dim=1).numpy()
    assert (ids == mixed_blobs.truth)[known].mean() >= 0.95, "without a matching"


def test_contrast_on_numbers_worked_by_hand() -> None:
    similarity = torch.tensor([[9.0, 1.0, 0.0], [1.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    alike = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    # The first two have each other, with probability e / (e + 1); the third has nobody, and does not count.
    assert contrastive(similarity, alike).item() == pytest.approx(math.log(1 + math.exp(-1)))
    # Shares of 3/4 and 1/4 of a row's target.
    uneven = torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    expected = 0.75 * math.log(1 + math.exp(-1)) + 0.25 * math.log(1 + math.e)
    assert contrastive(similarity, uneven).item() == pytest.approx(expected)
    assert contrastive(similarity, torch.eye(3)).item() == 0.0


def test_pairs_of_views() -> None:
    assert same_image(2, torch.device("cpu")).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]] * 2
    assert same_class(torch.tensor([5, 5, 7]))[0].tolist() == [True, True, False] * 2


def test_self_distillation_on_numbers_worked_by_hand() -> None:
    teacher = torch.tensor([[0.0, math.log(3) / 2]], requires_grad=True)
    # Twice as sharp: 1/4 and 3/4. The student says 1/2 and 1/2.
    student = torch.zeros(1, 2, requires_grad=True)
    loss = self_distillation(student, teacher, 2.0)
    assert loss.item() == pytest.approx(math.log(2))
    loss.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[0.25, -0.25]]))
    assert teacher.grad is None


def test_the_teacher_of_simgcd_gets_sharper() -> None:
    method = SimGcd(SimGcdSettings(), 4, open_world=False)
    assert [round(method._sharpness(epoch), 4) for epoch in (0, 15, 30, 99)] == [1.4286, 1.8182, 2.5, 2.5]


def test_simgcd_collapses_without_the_entropy_of_the_mean(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(blob_config("simgcd", **{"method.entropy_weight": 0.0}), blobs, monkeypatch)
    with torch.no_grad():
        ids = state.model.branches[0](blobs.pile).cluster_logits.argmax(dim=1)
    assert len(ids.unique()) < NOVEL
    assert blob_accuracy(state, blobs) < 0.9


def output_of(embedding: torch.Tensor, known: torch.Tensor) -> BranchOutput:
    return BranchOutput(torch.zeros(0), embedding, known, torch.zeros(0))


def test_uno_s_targets_are_labels_and_equal_clusters() -> None:
    method = Uno(UnoSettings(heads=1), 2, known=2, clusters=2, open_world=False)
    # Both unlabelled images are nearer to the first cluster, the second one less so.
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0], [9.0, 9.0, 10.0, 0.0], [9.0, 9.0, 10.0, 9.0]])
    targets = method._targets(logits, torch.tensor([1]))
    assert targets[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert targets[1:, :2].sum() == 0
    torch.testing.assert_close(targets[1:].sum(dim=1), torch.ones(2))
    torch.testing.assert_close(targets[1:, 2:].argmax(dim=1), torch.tensor([0, 1]))


def test_uno_serves_the_head_with_the_lowest_loss() -> None:
    method = Uno(UnoSettings(heads=2, fineness=3), 2, known=1, clusters=2, open_world=False)
    assert [head.out_features for head in method.finer] == [6, 6]
    good = torch.eye(2)
    with torch.no_grad():
        method.heads[0].weight.copy_(torch.tensor([[1.0, 1.0], [1.0, 1.01]]))
        method.heads[1].weight.copy_(good)
    embedding = torch.tensor([[-1.0, -1.0], [1.0, 0.0], [0.0, 1.0]])
    seen = [output_of(embedding, torch.zeros(3, 1))]
    batch = Batch(seen, seen, torch.tensor([0]), torch.tensor([0, 1]), 1.0)
    nothing: Any = None
    method.before_epoch(nothing, 0, nothing)
    method(batch)
    method.remember(batch, branches=nothing, generator=nothing)
    assert method.losses[1] < method.losses[0]
    model: Any = nn.Module()
    model.branches = [small_branch(known=1, novel=2, heads="separate")]
    method.after_epoch(model, 1, nothing)
    torch.testing.assert_close(model.branches[0].linear_cluster_head.weight.detach(), good)


def small_branch(*, known: int, novel: int, heads: Any) -> Branch:
    return Branch(ConvTail(nn.Identity(), nn.ReLU()), 2, known=known, novel=novel, heads=heads, form="cosine")


def test_mutual_information_on_numbers_worked_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)], [math.log(3.0), 0.0]])
    # The mean prediction of all three is even; the two unlabelled ones are 1/4 and 3/4.
    unsure = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert mutual_information(logits, 1, 0.5).item() == pytest.approx(0.5 * unsure - math.log(2))


def drawn(sizes: list[int], spread: float, seed: int = 0, *, common: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit rows around some directions, and the numbers of these; three dimensions vary `common` times as much."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    centres = F.normalize(torch.randn(len(sizes), 16, generator=generator), dim=1)
    widths = spread * torch.tensor([common] * 3 + [1.0] * 13)
    return F.normalize(centres[ids] + widths * torch.randn(len(ids), 16, generator=generator), dim=1), ids


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pim_is_better_than_semi_supervised_k_means_where_classes_vary_alike(seed: int) -> None:
    rows, ids = drawn([30] * 12, 0.2, seed, common=3.0)
    labels = ids[:180]
    settings = PimSettings(iterations=60, starts=3, strengths=(0.2, 0.5, 1.0), learning_rate=1e-2)
    branch = Branch(ConvTail(nn.Identity(), nn.ReLU()), 16, known=6, novel=6, heads="open_world", form="cosine")
    found = pile_ids(branch, rows, labels, starts=3, seed=0)
    centre_heads(branch, rows, labels, found)
    strength = chosen_strength(rows, labels, 12, settings, seed=0)
    weights = fitted(branch.linear_cluster_head.weight.detach(), rows, labels, settings, strength=strength)
    ours = (rows[180:] @ F.normalize(weights, dim=1).T).argmax(dim=1).numpy()
    true = ids[180:].numpy()
    assert cluster_accuracy(ours, true) > cluster_accuracy(found.numpy(), true) + 0.02


def test_heads_at_centres() -> None:
    rows = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0], [1.0, 1.0]])
    labels, ids = torch.tensor([0, 1]), torch.tensor([0, 1])
    apart, opened = (
        small_branch(known=2, novel=number, heads=heads) for number, heads in ((2, "separate"), (1, "open_world"))
    )
    centre_heads(apart, rows, labels, ids)
    assert apart.known_head is not None
    torch.testing.assert_close(apart.known_head.weight.detach(), torch.eye(2))
    half = math.sqrt(0.5)
    torch.testing.assert_close(apart.linear_cluster_head.weight.detach(), torch.tensor([[0.0, 1.0], [half, half]]))
    centre_heads(opened, rows, labels, torch.tensor([1, 2]))
    expected = torch.tensor([[1.0, 0.0], [0.0, 2.0], [half, half]])
    torch.testing.assert_close(opened.linear_cluster_head.weight.detach(), expected)


def test_clusters_keep_their_numbers_between_clusterings() -> None:
    before = torch.tensor([0, 5, 5, 6, 6, 7, 7, 7])
    now = torch.tensor([0, 7, 7, 5, 5, 6, 6, 5])
    assert with_kept_ids(now, before, first=5).tolist() == [0, 5, 5, 6, 6, 7, 7, 6]
    assert with_kept_ids(torch.tensor([0, 1]), torch.tensor([5, 6]), first=5).tolist() == [0, 1]


def test_a_hierarchy_halves_known_classes_and_clusters() -> None:
    rows, ids = drawn([10] * 8, 0.1)
    labels = ids[:40]
    found = hierarchy(rows, labels, 4, SelexSettings(levels=3), mixed=False, seed=0)
    assert found.classes[0].tolist() == list(range(4))
    assert [len(row.unique()) for row in found.classes] == [4, 2, 1]
    assert [row.unique().tolist() for row in found.pile] == [[4, 5, 6, 7], [2, 3], [1]]
    assert cluster_accuracy((found.pile[0] - 4).numpy(), (ids[40:] - 4).numpy()) == 1.0
    first = rows[:10]
    radius = (first - first.mean(dim=0)).norm(dim=1).mean()
    torch.testing.assert_close(found.radii[0, 0], radius)


def test_balanced_clusters_leave_room_for_labelled_images() -> None:
    rows, _ = drawn([12, 4], 0.3)
    ids = balanced_ids(rows, torch.arange(16) % 2, torch.zeros(2, 16), torch.tensor([12.0, 4.0]))
    assert torch.bincount(ids).tolist() == [12, 4]


def test_selex_targets_spare_images_that_are_far_away() -> None:
    method = Selex(SelexSettings(levels=1, smoothing=0.5), 2, known=1, clusters=1, images=1)
    method.radii.copy_(torch.tensor([[0.1, 1.0]]))
    seen = [output_of(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 1))]
    batch = Batch(seen, seen, torch.tensor([0]), torch.tensor([0]), 1.0)
    targets = method._view_targets(batch, torch.tensor([[0], [1]]).T)
    # For the first image the second is 1.41 away, more than 0.2; for the second, less than 2.
    torch.testing.assert_close(targets[0], torch.tensor([0.0, 1 / 6, 2 / 3, 1 / 6]))
    torch.testing.assert_close(targets[1], torch.tensor([0.0, 0.0, 0.0, 1.0]))


def test_distances_of_unit_rows_have_a_gradient_everywhere() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    found = distances(rows)
    assert found[0, 2].item() == pytest.approx(math.sqrt(2))
    found.sum().backward()
    assert rows.grad is not None and rows.grad.isfinite().all()


def test_a_cosine_ends_at_a_thousandth_of_the_learning_rate() -> None:
    optim = blob_config("simgcd", **{"optim.epochs": 10, "optim.learning_rate": 0.1}).optim
    assert [learning_rate(optim, epoch) for epoch in (0, 5, 10)] == pytest.approx([0.1, 0.05005, 0.0001])


def test_a_cosine_head_has_the_student_s_temperature() -> None:
    assert CosineHead.SCALE == 10.0
    assert class_sums(torch.ones(3, 1), torch.tensor([0, 0, 2]), 3).flatten().tolist() == [2.0, 0.0, 1.0]
