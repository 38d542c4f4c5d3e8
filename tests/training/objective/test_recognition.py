"""Known classes among unlabelled images: numbers worked by hand, and problems with a known answer."""

import pytest
import torch
from ncd_training.objective.recognition import (
    MIXED_SHARE,
    evidence,
    known_chances,
    nearest_neighbours,
    recognise,
)


def test_neighbours_by_hand() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 3.0])
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert nearest_neighbours(rows, torch.arange(4), 2).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert nearest_neighbours(rows, torch.arange(4), 10).shape == (4, 3)
    assert nearest_neighbours(rows, torch.tensor([1, 3]), 1).tolist() == [[1], [3], [1], [1]]


def test_evidence_by_hand() -> None:
    # Two labelled classes at 0 and 90 degrees; the last row is at 37 degrees, cosine 0.8, and has all others around it.
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    torch.testing.assert_close(
        evidence(rows, torch.tensor([0, 0, 1]), torch.arange(4)), torch.tensor([[0.8, 3.0, 2.0]])
    )


def test_chances_by_hand() -> None:
    # Half of the images are three times as likely if known, the others if novel: the shares are halves.
    found = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0], [1.0, 3.0]], dtype=torch.double).log()
    torch.testing.assert_close(known_chances(found.unsqueeze(0)).chances, torch.tensor([0.75, 0.75, 0.25, 0.25]))
    # Nobody looks like the last kind, whose likelihoods do not count then.
    third = torch.full((4, 1), 1e-9, dtype=torch.double).log()
    chances = known_chances(torch.cat([found, third], dim=1).unsqueeze(0)).chances
    torch.testing.assert_close(chances, torch.tensor([0.75, 0.75, 0.25, 0.25]))


def drawn(known_in_pile: int, each: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw 10 known classes of 20 labelled images, and a pile of `known_in_pile` of each and `each` of 8 novel ones."""
    torch.manual_seed(0)
    centres = torch.randn(18, 16)
    labels = torch.arange(10).repeat_interleave(20)
    novel = torch.arange(10, 18).repeat_interleave(each)
    pile = torch.cat([torch.arange(10).repeat_interleave(known_in_pile), novel])
    numbers = torch.cat([labels, pile])
    return centres[numbers] + 0.5 * torch.randn(len(numbers), 16), labels, pile < 10


GEOMETRY = {"shrinkage": 0.1, "dims": 16, "seed": 0}


@pytest.mark.parametrize("each", [20, 3])
def test_a_pile_of_novel_classes_has_next_to_no_known_images(each: int) -> None:
    features, labels, _ = drawn(0, each)
    found = recognise(features, labels, **GEOMETRY)
    assert not found.mixed and found.share < MIXED_SHARE / 2


def test_known_images_in_a_mixed_pile_are_told_from_novel_ones() -> None:
    features, labels, known = drawn(16)
    found = recognise(features, labels, **GEOMETRY)
    assert found.share == pytest.approx(0.5, abs=0.1)
    assert ((found.chances > 0.5) == known).float().mean() > 0.95


def test_classes_that_the_geometry_has_not_seen_are_not_taken_for_known_ones() -> None:
    """Few images in many dimensions: the geometry fits the labelled ones by heart, and makes them look tight."""
    torch.manual_seed(0)
    numbers = torch.arange(40).repeat_interleave(10)
    features, labels = torch.randn(40, 256)[numbers] + 2.5 * torch.randn(400, 256), numbers[:300]
    assert recognise(features, labels, shrinkage=0.1, dims=64, seed=0).share < MIXED_SHARE / 2


@pytest.mark.parametrize(("classes", "each"), [(2, 1), (2, 2), (5, 4), (5, 10), (21, 4)])
def test_features_or_labels_that_tell_nothing_recognise_nothing(classes: int, each: int) -> None:
    torch.manual_seed(1)
    features, labels = torch.randn(classes * each + 20, 64), torch.arange(classes).repeat_interleave(each)
    assert recognise(features, labels, shrinkage=0.1, dims=32, seed=1).share == 0.0
