from collections.abc import Iterator
from pathlib import Path

import pytest

from ncd_serve.errors import NcdError
from ncd_serve.triton import TritonServer, find_triton


@pytest.fixture(scope="session")
def triton() -> None:
    """Skip what needs a server binary where there is none."""
    try:
        find_triton()
    except NcdError as error:
        pytest.skip(f"no Triton here: {error}")


@pytest.fixture(scope="session")
def server(triton: None, bundle: Path, repository: Path) -> Iterator[TritonServer]:
    """A real Triton on the exported tiny run."""
    # Strict: the generated configuration has to be complete.
    with TritonServer(repository, extra_arguments=["--disable-auto-complete-config"]) as running:
        running.wait_ready(120)
        yield running
