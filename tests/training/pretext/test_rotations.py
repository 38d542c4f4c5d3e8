from __future__ import annotations

import math

import pytest
import torch
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import Trunk
from ncd_training.pretext import Rotations, TrunkAndTail, with_all_turns


def test_every_image_is_turned_four_times() -> None:
    image = torch.tensor([[1, 2], [3, 4]]).expand(1, 3, 2, 2)
    turned, turns = with_all_turns(torch.cat([image, image + 4]))
    assert turns.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [turned[row, 0].tolist() for row in (0, 2, 4, 6)] == [
        [[1, 2], [3, 4]],
        [[2, 4], [1, 3]],
        [[4, 3], [2, 1]],
        [[3, 1], [4, 2]],
    ]
    assert torch.equal(turned[1::2], turned[::2] + 4)


def test_the_loss_is_cross_entropy_of_the_turn() -> None:
    parts = build_trunk("small_resnet", resolution=32)
    task = Rotations(TrunkAndTail(Trunk(parts), parts.tail), parts.dim).eval()
    torch.nn.init.zeros_(task.head.weight)
    task.head.bias.data = torch.tensor([math.log(2.0), 0.0, 0.0, 0.0])  # answers turn 0 with 2/5, others with 1/5
    result = task(torch.zeros(3, 3, 32, 32, dtype=torch.uint8))
    assert result.loss.item() == pytest.approx(-(math.log(0.4) + 3 * math.log(0.2)) / 4)
    assert result.accuracy.item() == 0.25


def test_the_trunk_learns_until_it_is_frozen_again() -> None:
    parts = build_trunk("small_resnet", resolution=32)
    network = TrunkAndTail(Trunk(parts), parts.tail)
    network.train()
    assert parts.frozen.training and all(weight.requires_grad for weight in parts.frozen.parameters())
    network.eval()
    assert not parts.frozen.training
    network.train()
    network.freeze()
    assert not parts.frozen.training and not any(weight.requires_grad for weight in parts.frozen.parameters())
