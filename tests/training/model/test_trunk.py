from typing import Any

import torch
from ncd_training.config.schema import PseudoLabelConfig
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.trunk import Layout, PooledTail, cubic_mean
from torch import nn


def test_images_are_described_by_the_cubic_mean_of_parts_or_by_the_class_token() -> None:
    parts = torch.tensor([[[[1.0, 2.0], [0.0, 0.0]], [[2.0, 2.0], [2.0, 2.0]]]])
    torch.testing.assert_close(cubic_mean(parts), torch.tensor([[(9 / 4) ** (1 / 3), 2.0]]))
    torch.manual_seed(0)
    for backbone in ("small_resnet", "efficientnet_lite0"):
        tail = build_trunk(backbone, resolution=64).tail.eval()
        model = DualBranchModel(build_trunk(backbone, resolution=64), known=2, novel=2).eval()
        maps = model.to_maps(torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8))
        torch.testing.assert_close(tail.describe(maps), cubic_mean(tail(maps).parts))
    tail, tokens = build_trunk("vit_small", resolution=32).tail, torch.randn(3, 5, 384)
    torch.testing.assert_close(tail.describe(tokens), tail(tokens).embedding)


def test_a_transformers_tail_learns_what_the_whole_block_would_learn() -> None:
    torch.manual_seed(0)
    tail: Any = build_trunk("vit_small", resolution=32).tail
    tokens, slope = torch.randn(3, 5, 384), torch.randn(3, 384)
    whole = torch.relu(tail.norm(tail.block(tokens)))
    expected = torch.autograd.grad((whole[:, 0] * slope).sum(), list(tail.parameters()))
    parts, embedding = tail(tokens)
    torch.testing.assert_close(embedding, whole[:, 0])
    torch.testing.assert_close(parts, whole[:, 1:].transpose(1, 2).reshape(3, 384, 2, 2))
    assert not parts.requires_grad
    torch.testing.assert_close(torch.autograd.grad((embedding * slope).sum(), list(tail.parameters())), expected)
    tail.with_parts = False
    none, alone = tail(tokens)
    assert none.shape == (3, 384, 0, 0)
    torch.testing.assert_close(alone, embedding)


def test_only_branches_that_compare_parts_make_a_transformer_compute_them() -> None:
    tokens = torch.randn(2, 5, 384)
    for labels, shapes in (
        (PseudoLabelConfig(), [(2, 384, 0, 0), (2, 384, 2, 2)]),
        (PseudoLabelConfig(negatives="local"), [(2, 384, 2, 2), (2, 384, 2, 2)]),
        (PseudoLabelConfig(positives="global", negatives="global"), [(2, 384, 0, 0), (2, 384, 0, 0)]),
    ):
        model = DualBranchModel(build_trunk("vit_small", resolution=32), known=3, novel=2, labels=labels)
        assert [output.parts.shape for output in model(tokens)] == shapes


def test_the_mean_of_trunk_maps_is_over_places_in_every_layout() -> None:
    maps, expected = torch.arange(24.0).reshape(1, 2, 3, 4), torch.tensor([[5.5, 17.5]])
    forms = {"NCHW": maps, "NHWC": maps.permute(0, 2, 3, 1), "NLC": maps.flatten(2).transpose(1, 2)}
    for kind, form in forms.items():
        tail = PooledTail(nn.Sequential(), nn.Identity(), Layout(kind, (3, 4)))
        torch.testing.assert_close(tail.mean_of(form), expected)
