"""A tiny run on tiny embedded data, trained and exported once for all tests that need one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Two test processes, or a test beside a build, share two cores: threads that wait for each other would crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from ncd_serve.files import locked

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


# The files that take longest. Begun first, they run beside all others; begun last, the other processes would wait.
LONG = (
    "docs/test_docs.py",
    "training/model/test_cut.py",
    "training/run/test_train.py",
    "e2e/test_studio.py",
    "export/test_trunks.py",
    "export/test_every_method.py",
    "e2e/test_ray.py",
    "training/model/test_hub.py",
    "training/test_api.py",
    "serve/doctor/test_self_test.py",
    "training/base/test_distributed.py",
    "e2e/test_second_round.py",
    "e2e/test_faults.py",
    "e2e/test_road.py",
    "serve/triton/test_supervise.py",
    "training/model/test_onnx.py",
    "contract/test_exit_codes.py",
    "docs/test_notebook.py",
    "e2e/test_serve_command.py",
    "export/test_export.py",
    "training/objective/test_methods.py",
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and mark tests of the tiny run as slow: it has to be trained for the first of them."""
    for item in items:
        if "tiny_run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    first = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: first.get(item.path, len(LONG)))


def run_ncd(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it, in a process of its own."""
    command = [sys.executable, "-m", "ncd_serve", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="session")
def ncd() -> Ncd:
    return run_ncd


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands of other test processes do not see the servers of this one."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes of this call of pytest share; who makes something in it has it `locked`."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def glyphs(shared: Path) -> Path:
    """A few images of every class of the embedded data."""
    from ncd_training.data.datasets.glyphs import write_glyphs

    with locked(shared):
        folder = shared / "glyphs"
        return folder if folder.exists() else write_glyphs(folder, train=4, test=2)


@pytest.fixture(scope="session")
def tiny_settings() -> list[str]:
    return [part for setting in TINY for part in ("--set", setting)]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, shared: Path, glyphs: Path, tiny_settings: list[str]) -> Path:
    """A trained run directory: a copy of the one that the first test process to need it has trained."""
    trained = shared / "tiny"
    with locked(shared):
        if not trained.exists():
            made = shared / "training"
            done = run_ncd("train", "--dataset", "glyphs", "--data-root", glyphs, "--out", made, *tiny_settings)
            assert done.returncode == 0, done.stderr
            made.rename(trained)
    return shutil.copytree(trained, tmp_path_factory.mktemp("runs") / "tiny")


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
