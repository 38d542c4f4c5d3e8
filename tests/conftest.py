"""A tiny run on tiny embedded data, trained and exported once for all tests that need one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Two test processes, or a test beside a build, share two cores: threads that wait for each other would crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# A suite started in the background inherits "ignore Ctrl-C", and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

Ncd = Callable[..., "subprocess.CompletedProcess[str]"]
TINY = (
    "optim.epochs=2",
    "optim.labelled_batch=16",
    "optim.unlabelled_batch=16",
    "rotations.epochs=1",
    "rotations.batch=16",
    "supervised.epochs=1",
    "supervised.batch=16",
    "data.cache_views=0",
    "data.workers=0",
    "model.dictionary_size=64",
    "model.bank_size=64",
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the tiny run are slow even where they are not themselves: it has to be trained for the first of them."""
    for item in items:
        if "tiny_run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def run_ncd(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it, in a process of its own."""
    command = [sys.executable, "-m", "ncd_serve", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="session")
def ncd() -> Ncd:
    return run_ncd


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few images of every class of the embedded data."""
    from ncd_training.data.datasets.glyphs import write_glyphs

    return write_glyphs(tmp_path_factory.mktemp("data") / "glyphs", train=4, test=2)


@pytest.fixture(scope="session")
def tiny_settings() -> list[str]:
    return [part for setting in TINY for part in ("--set", setting)]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, glyphs: Path, tiny_settings: list[str]) -> Path:
    """A trained run directory."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    done = run_ncd("train", "--dataset", "glyphs", "--data-root", glyphs, "--out", folder, *tiny_settings)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model repository that `bundle` is exported to."""
    return tmp_path_factory.mktemp("export") / "model_repository"


@pytest.fixture(scope="session")
def bundle(tiny_run: Path, repository: Path) -> Path:
    """The tiny run, exported."""
    folder = repository.parent / "bundle"
    done = run_ncd("export", tiny_run, "--out", folder, "--repository", repository)
    assert done.returncode == 0, done.stderr
    return folder
