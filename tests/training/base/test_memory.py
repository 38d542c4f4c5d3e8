"""Memory that is kept between steps."""

from __future__ import annotations

import ctypes
import resource

import pytest
import torch
from ncd_training.base.memory import kept_memory

PAGES = 64 * 2**20 // resource.getpagesize()


def pages_fetched() -> int:
    """Pages that a tensor of 64 MB gets from the system."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_a_large_tensor_takes_the_memory_of_the_one_before_it() -> None:
    with kept_memory():
        for _ in range(10):  # until no free piece is a few bytes too small
            pages_fetched()
        assert pages_fetched() < PAGES / 10
    assert pages_fetched() > PAGES / 10  # the system has it back
