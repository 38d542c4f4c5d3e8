from typing import Any

import torch
from ncd_training.trunk import build_trunk


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
