"""Random views of an image. One function for each kind of image, chosen by `data.augmentation`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncd_training.base.vision import v2

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL import Image
    from torch import Tensor

    Augmentation = Callable[[Image.Image], Tensor]


def build_augmentation(name: str, resolution: int) -> Augmentation:
    """Return a function from a PIL image to one random view, uint8 [3, resolution, resolution].

    Random numbers come from torch's default generator.
    """
    augmentation: Augmentation = v2.Compose(_STEPS[name](resolution))
    return augmentation


def smallest_part(name: str) -> float:
    """Return the smallest fraction of an image's area that a view may show; it limits the size to decode at."""
    return _SMALLEST_PART.get(name, 1.0)


def _crop(resolution: int) -> list[v2.Transform]:
    """Return transforms for photographs, as in the paper: random crop of at least half the image, random mirroring."""
    scale = (_SMALLEST_PART["crop"], 1.0)
    return [v2.RandomResizedCrop(resolution, scale=scale), v2.RandomHorizontalFlip(), v2.PILToTensor()]


def _moco(resolution: int) -> list[v2.Transform]:
    """Return transforms of MoCo v2: small crops, strong colour changes, blur, so that views share only content."""
    kernel = max(3, resolution // 10 | 1)  # odd, a tenth of the side
    return [
        v2.RandomResizedCrop(resolution, scale=(_SMALLEST_PART["moco"], 1.0)),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(0.2),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
        v2.RandomApply([v2.GaussianBlur(kernel, sigma=(0.1, 2.0))], p=0.5),
    ]


def _shift(padding_mode: str) -> Callable[[int], list[v2.Transform]]:
    """Return transforms for small images: shift by up to an eighth of the side (4 of 32 px), random mirroring."""

    def steps(resolution: int) -> list[v2.Transform]:
        return [
            v2.Resize((resolution, resolution)),
            v2.RandomCrop(resolution, padding=resolution // 8, padding_mode=padding_mode),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]

    return steps


def _glyph(resolution: int) -> list[v2.Transform]:
    """Return transforms for characters, which keep their orientation and are never mirrored."""
    return [
        v2.Resize((resolution, resolution)),
        v2.RandomAffine(6, (0.05, 0.05), (0.9, 1.1), 5, interpolation=v2.InterpolationMode.BILINEAR),
        v2.ColorJitter(0.4, 0.4, 0.4),
        v2.PILToTensor(),
        v2.RandomChannelPermutation(),
    ]


_SMALLEST_PART = {"crop": 0.5, "moco": 0.2}
_STEPS: dict[str, Callable[[int], list[v2.Transform]]] = {
    "crop": _crop,
    "glyph": _glyph,
    "cifar10": _shift("reflect"),
    "cifar100": _shift("constant"),
    "moco": _moco,
}
