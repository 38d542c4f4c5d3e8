"""Seeds of all random choices: functions of the run's seed and a purpose, so a resume needs no saved generators."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """Purpose that a seed is drawn for. The numbers never change: published results depend on them."""

    ORDER = 0
    VIEW = 1
    CACHED_VIEW = 2
    PARTS = 3
    SELF_LABELS = 4
    HELD_OUT = 5
    ESTIMATE = 6


def seed_for(*parts: int) -> int:
    """Return a 63-bit seed from whole numbers such as (run seed, purpose, epoch, image)."""
    low, high = np.random.SeedSequence(parts).generate_state(2)
    return int(low) | (int(high) >> 1) << 32


def generator_for(*parts: int) -> torch.Generator:
    """Return a torch generator that is seeded for one purpose."""
    return torch.Generator().manual_seed(seed_for(*parts))
