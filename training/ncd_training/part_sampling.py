"""Which part features of an image enter the part dictionary. All take part maps [B, d, h, w] and return [n, d]."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL_MAP = 4


def random_parts(parts: Tensor, generator: torch.Generator) -> Tensor:
    """One part of each image, at a uniformly random location."""
    batch, _, height, width = parts.shape
    return _at(parts, torch.randint(height * width, (batch,), generator=generator))


def all_parts(parts: Tensor) -> Tensor:
    """Every location of every image."""
    return parts.flatten(2).transpose(1, 2).flatten(0, 1)


def cam_parts(parts: Tensor, class_weights: Tensor) -> Tensor:
    """The part of each image that speaks most for its class, whose head weights [B, d] are given (CAM)."""
    activation = torch.einsum("bdl,bd->bl", parts.flatten(2), class_weights)
    return _at(parts, activation.argmax(dim=1))


def inner_parts(parts: Tensor) -> Tensor:
    """Maps without their outermost locations, where those are few enough to miss: maps up to 4x4 stay whole."""
    return parts[:, :, 1:-1, 1:-1] if min(parts.shape[2:]) > _SMALL_MAP else parts


def _at(parts: Tensor, locations: Tensor) -> Tensor:
    rows = torch.arange(len(parts), device=parts.device)
    return parts.flatten(2)[rows, :, locations.to(parts.device)]
