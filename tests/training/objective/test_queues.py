from copy import deepcopy

import pytest
import torch
from ncd_training.objective.pseudo_labels import all_parts, cam_parts, random_parts
from ncd_training.objective.queues import FeatureBanks, FifoQueue, PartDictionary


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1)


def test_queue_wraps_around_and_shows_only_what_was_pushed() -> None:
    queue = FifoQueue(3, 1)
    assert queue.filled.shape == (0, 1)
    queue.push(rows(1, 2))
    assert queue.filled.flatten().tolist() == [1, 2]
    queue.push(rows(3, 4))
    assert queue.filled.flatten().tolist() == [4, 2, 3]


def test_queue_keeps_the_newest_of_a_push_larger_than_itself() -> None:
    queue = FifoQueue(3, 1)
    queue.push(rows(1, 2, 3, 4, 5))
    assert sorted(queue.filled.flatten().tolist()) == [3, 4, 5]
    queue.push(rows(6))
    assert sorted(queue.filled.flatten().tolist()) == [4, 5, 6]


def test_the_number_of_pushed_vectors_is_saved_restored_and_copied() -> None:
    banks = FeatureBanks(3, 1, branches=1)
    banks.push([rows(1, 2)])
    state = banks.state_dict()
    assert list(state) == ["queues.0.vectors", "queues.0.pushed"]
    assert state["queues.0.pushed"].dtype == torch.long and state["queues.0.pushed"].shape == ()
    restored = FeatureBanks(3, 1, branches=1)
    restored.load_state_dict(state)
    copied = deepcopy(banks)
    for queue in (banks, restored, copied):
        queue.push([rows(3, 4)])
        assert queue.filled[0].flatten().tolist() == [4, 2, 3]
    with pytest.raises(RuntimeError, match=r"queues\.0\.pushed"):
        restored.load_state_dict({"queues.0.vectors": torch.zeros(3, 1)})


def test_vectors_that_are_not_finite_leave_their_slots_as_they_were() -> None:
    queue = FifoQueue(3, 2)
    queue.push(torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    queue.push(torch.tensor([[3.0, 3.0], [torch.nan, 4.0], [5.0, torch.inf]]))
    assert queue.filled.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_banks_hold_the_same_image_in_the_same_slot() -> None:
    banks = FeatureBanks(5, 1, branches=2)
    for start in range(0, 14, 4):
        images = torch.arange(start, start + 4, dtype=torch.float32).view(-1, 1)
        banks.push([images, images + 100])
    first, second = banks.filled
    assert torch.equal(first + 100, second)


def test_description_by_hand() -> None:
    dictionary = PartDictionary(4, 1, similarity="euclidean", sharpness=1.0).eval()
    dictionary.push(rows(0, 2))
    dictionary.spread.fill_(1.0)
    parts = torch.tensor([[[[0.0, 2.0]]]])  # one image, one dimension, two locations
    # squared distances (0, 4) and (4, 0): the two softmaxes mirror each other, their mean is even
    assert dictionary.describe(parts)[0].tolist() == pytest.approx([0.5, 0.5])
    assert dictionary.describe(parts[..., :1])[0].tolist() == pytest.approx(
        torch.tensor([0.0, -4.0]).softmax(0).tolist()
    )


def test_description_by_directions_ignores_the_length_of_parts() -> None:
    dictionary = PartDictionary(4, 2, sharpness=1.0).eval()
    dictionary.push(torch.tensor([[3.0, 0.0], [0.0, 0.1]]))
    dictionary.spread.fill_(1.0)
    part = torch.tensor([5.0, 0.0]).view(1, 2, 1, 1)
    # unit vectors at a right angle are sqrt(2) apart; by Euclidean distance the short entry would be the nearer of two
    # for every short part
    expected = torch.tensor([0.0, -2.0]).softmax(0).tolist()
    assert dictionary.describe(part)[0].tolist() == pytest.approx(expected)
    assert dictionary.describe(part / 100)[0].tolist() == pytest.approx(expected)


def test_description_is_not_a_function_of_the_pooled_feature() -> None:
    """Two images with the same mean but different parts must differ: that is what the local branch is for."""
    dictionary = PartDictionary(8, 2)
    dictionary.push(torch.tensor([[0.0, 2.0], [2.0, 0.0], [1.0, 1.0]]))
    mixed = torch.tensor([[[[0.0, 2.0]], [[2.0, 0.0]]]])
    same = torch.ones(1, 2, 1, 2)
    assert not torch.allclose(dictionary.describe(mixed), dictionary.describe(same), atol=0.1)


def test_spread_follows_the_features_while_training_only() -> None:
    dictionary = PartDictionary(4, 1, similarity="euclidean", momentum=0.5)
    dictionary.push(rows(0))
    parts = torch.full((1, 1, 1, 1), 2.0)
    dictionary.describe(parts)
    assert dictionary.spread.item() == 4  # the first value is taken as it is
    dictionary.describe(parts * 2)
    assert dictionary.spread.item() == 10
    dictionary.eval().describe(parts * 100)
    assert dictionary.spread.item() == 10


def test_spread_ignores_what_is_not_finite() -> None:
    dictionary = PartDictionary(4, 1, similarity="euclidean", momentum=0.5)
    dictionary.push(rows(0))
    parts = torch.full((1, 1, 1, 1), 2.0)
    for broken in (parts * torch.inf, parts * torch.nan):
        dictionary.describe(broken)
        assert dictionary.spread.item() == 0
    dictionary.describe(parts)
    for broken in (parts * torch.inf, parts * torch.nan):
        dictionary.describe(broken)
        assert dictionary.spread.item() == 4


def test_part_sampling() -> None:
    parts = torch.arange(12.0).view(2, 3, 1, 2)  # image 0: locations (0, 2, 4) and (1, 3, 5)
    assert all_parts(parts).tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert cam_parts(parts, torch.tensor([[1.0, 0, 0], [0, 0, -1.0]])).tolist() == [[1, 3, 5], [6, 8, 10]]
    drawn = random_parts(parts.repeat(50, 1, 1, 1), torch.Generator().manual_seed(0))
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in all_parts(parts).tolist()}
