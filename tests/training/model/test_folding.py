"""Batch norm computed by the convolution before it: the same step as with torch's own."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from ncd_training.config.resolve import resolve_config
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.folding import FoldedNorm, fold_norms
from ncd_training.model.trunk import ConvTail
from ncd_training.objective.method import build_method
from ncd_training.run.step import TrainState, build_optimizer, train_step
from torch import Tensor, nn

LABELLED, UNLABELLED, KNOWN, NOVEL = 16, 8, 4, 3
# With heads of torch's own weights: larger ones change so much in a step that its rounding shows after the second.
CONFIG = resolve_config(recipes=["quick"], overrides={"data.dataset": "cub200", "model.head_gain": 1.0})


def after_steps(trunk: str, maps: Tensor, *, folded: bool) -> dict[str, Tensor]:
    """Weights, running statistics and memories after two steps at the recipe's learning rate."""
    torch.manual_seed(0)
    parts = build_trunk(trunk, resolution=64)
    model = DualBranchModel(parts, known=KNOWN, novel=NOVEL, model=CONFIG.model, labels=CONFIG.pseudo_labels)
    if folded:
        for branch in model.branches:
            fold_norms(branch.tail)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method = build_method(CONFIG, model, images=UNLABELLED, clusters=NOVEL)
    state = TrainState(model.train(), method.train(), build_optimizer(model, method, CONFIG.optim))
    labels, rows = torch.arange(LABELLED) % KNOWN, torch.arange(UNLABELLED)
    for _ in range(2):
        train_step(state, [*maps], labels, rows=rows, ramp=1.0, generator=torch.Generator().manual_seed(0))
    assert any(isinstance(module, FoldedNorm) for module in model.modules()) == folded
    return {**model.branches.state_dict(), **method.state_dict()}


@pytest.mark.parametrize(("trunk", "width"), [("efficientnet_lite0", 192), ("small_resnet", 64)])
def test_steps_give_the_same_weights_and_statistics(trunk: str, width: int) -> None:
    maps = torch.randn(2, LABELLED + UNLABELLED, width, 6, 6, generator=torch.Generator().manual_seed(1))
    found, expected = (after_steps(trunk, maps, folded=folded) for folded in (True, False))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5), name


class Block(nn.Module):
    """Block whose convolution has another reader beside the batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, maps: Tensor) -> Tensor:
        wide = self.conv(maps)
        return self.norm(wide) + wide


def test_only_a_batch_norm_that_alone_reads_a_widening_convolution_is_folded() -> None:
    def layers(out: int, **more: int) -> list[nn.Module]:
        return [nn.Conv2d(4, out, 1, bias=False, **more), nn.BatchNorm2d(out)]  # type: ignore[arg-type]

    for stages, folded in ((layers(8), 1), (layers(4), 0), (layers(8, stride=2), 0), ([Block()], 0)):
        tail = ConvTail(*deepcopy(stages))
        fold_norms(tail)
        assert sum(isinstance(module, FoldedNorm) for module in tail.modules()) == folded
        maps = torch.randn(3, 4, 5, 5)
        torch.testing.assert_close(tail.train()(maps), ConvTail(*stages).train()(maps))
        torch.testing.assert_close(tail.eval()(maps), ConvTail(*stages).eval()(maps))
