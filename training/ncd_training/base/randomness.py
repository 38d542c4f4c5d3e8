"""Every random choice is a function of the run's seed and of what it is for, so nothing needs to be saved to resume."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What a seed is drawn for. A number never changes: published results depend on it."""

    ORDER = 0
    VIEW = 1
    CACHED_VIEW = 2
    PARTS = 3
    SELF_LABELS = 4
    HELD_OUT = 5
    ESTIMATE = 6


def seed_for(*parts: int) -> int:
    """A 63-bit seed from whole numbers such as (run seed, purpose, epoch, image)."""
    low, high = np.random.SeedSequence(parts).generate_state(2)
    return int(low) | (int(high) >> 1) << 32


def generator_for(*parts: int) -> torch.Generator:
    """A torch generator of its own for one purpose."""
    return torch.Generator().manual_seed(seed_for(*parts))
