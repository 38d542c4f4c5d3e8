from __future__ import annotations

import numpy as np
import pytest
import torch
from ncd_training.data.views import build_augmentation, smallest_part
from PIL import Image

# Every pixel tells its place: red is the column, green the row.
PLACES = np.stack([*np.meshgrid(np.arange(32), np.arange(32)), np.full((32, 32), 7)], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("name", ["crop", "glyph", "cifar10", "cifar100", "moco"])
@pytest.mark.parametrize("size", [(32, 32), (70, 45)])
def test_views_have_the_resolution_and_follow_the_seed(name: str, size: tuple[int, int]) -> None:
    augment = build_augmentation(name, 32)
    image = Image.fromarray(PLACES * 7).resize(size)

    def view(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return augment(image)

    assert view(0).shape == (3, 32, 32) and view(0).dtype == torch.uint8
    assert torch.equal(view(5), view(5))
    assert len({view(seed).numpy().tobytes() for seed in range(8)}) > 4


@pytest.mark.parametrize(("name", "border"), [("cifar10", {7}), ("cifar100", {0, 7})])
def test_small_pictures_are_moved_by_up_to_four_pixels(name: str, border: set[int]) -> None:
    augment = build_augmentation(name, 32)
    shifts, seen, mirrored = set(), set(), set()
    for seed in range(150):
        torch.manual_seed(seed)
        red, green, blue = augment(Image.fromarray(PLACES))
        seen |= set(blue.unique().tolist())
        mirrored.add(bool(red[16, 15] > red[16, 16]))
        shifts.add(int(green[16, 16]) - 16)
    assert shifts == set(range(-4, 5))
    assert mirrored == {False, True}
    assert seen == border  # reflected pixels are pixels of the picture, padded ones are black


def test_how_large_images_must_be() -> None:
    assert (smallest_part("crop"), smallest_part("moco"), smallest_part("cifar10")) == (0.5, 0.2, 1.0)
