"""Random views of an image. One function for each kind of picture, chosen by `data.augmentation`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncd_training.vision import v2

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL import Image
    from torch import Tensor

    Augmentation = Callable[[Image.Image], Tensor]


def build_augmentation(name: str, resolution: int) -> Augmentation:
    """PIL image to one random view, uint8 [3, resolution, resolution]; draws from torch's default generator."""
    steps = {"crop": _crop, "glyph": _glyph}[name](resolution)
    augmentation: Augmentation = v2.Compose(steps)
    return augmentation


def _crop(resolution: int) -> list[v2.Transform]:
    """Photographs, as in the paper: a random part of at least half the image, perhaps mirrored."""
    return [v2.RandomResizedCrop(resolution, scale=(0.5, 1.0)), v2.RandomHorizontalFlip(), v2.PILToTensor()]


def _glyph(resolution: int) -> list[v2.Transform]:
    """Characters: they keep their orientation and are never mirrored."""
    return [
        v2.Resize((resolution, resolution)),
        v2.RandomAffine(6, (0.05, 0.05), (0.9, 1.1), 5, interpolation=v2.InterpolationMode.BILINEAR),
        v2.ColorJitter(0.4, 0.4, 0.4),
        v2.PILToTensor(),
        v2.RandomChannelPermutation(),
    ]
