"""Known classes among unlabelled images: numbers worked by hand, and problems with a known answer."""

import pytest
import torch
import torch.nn.functional as F
from ncd_training.objective.recognition import MIXED_SHARE, known_chances, nearest_neighbours, recognise


def test_neighbours_by_hand() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 3.0])
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert nearest_neighbours(rows, 2).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert nearest_neighbours(rows, 10).shape == (4, 3)


def test_chances_by_hand() -> None:
    # Smoothed by a half each: novel images have no labelled neighbour in 3/4, known ones in 1/4 of the cases.
    novel, known = torch.tensor([2.5, 0.5]).double(), torch.tensor([0.5, 2.5]).double()
    found = known_chances(novel, known, torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))
    # 4 of 8 images have a labelled neighbour: 3/4 s + 1/4 (1 - s) = 1/2 has the solution s = 1/2.
    assert found.share == pytest.approx(0.5)
    torch.testing.assert_close(found.chances, torch.tensor([0.25] * 4 + [0.75] * 4))


def drawn(known_in_pile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unit rows of 10 known classes with 20 labelled images each, then `known_in_pile` of each and 8 novel classes."""
    torch.manual_seed(0)
    centres = torch.randn(18, 16)
    labels = torch.arange(10).repeat_interleave(20)
    pile = torch.cat([torch.arange(10).repeat_interleave(known_in_pile), torch.arange(10, 18).repeat_interleave(20)])
    numbers = torch.cat([labels, pile])
    return F.normalize(centres[numbers] + 0.5 * torch.randn(len(numbers), 16), dim=1), labels, pile < 10


def test_a_pile_of_novel_classes_has_next_to_no_known_images() -> None:
    rows, labels, _ = drawn(0)
    assert recognise(rows, labels, seed=0).share < MIXED_SHARE / 2


def test_known_images_in_a_mixed_pile_are_told_from_novel_ones() -> None:
    rows, labels, known = drawn(16)
    found = recognise(rows, labels, seed=0)
    assert found.share == pytest.approx(0.5, abs=0.1)
    assert ((found.chances > 0.5) == known).float().mean() > 0.95
