"""Examples for about half a minute; many more with `pytest tests/fuzz --hypothesis-profile=long`."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOM = 1536 << 20  # that a test may take beyond what the process has: the budget of decoders, twice
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

for name, examples in (("default", 150), ("long", 3_000)):
    settings.register_profile(name, max_examples=examples, deadline=None, suppress_health_check=CHECKS, database=None)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def limited_memory() -> Iterator[None]:
    """Limit the address space, so that whoever asks for gigabytes gets a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
