from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.deploy import Target
from ncd_serve.deploy.facts import Deployment, collect_facts
from ncd_serve.deploy.render import render

Tool = Callable[..., str]


@pytest.fixture(scope="session")
def tool() -> Tool:
    """Runs a checker, which has to be content. Where it is missing the test is skipped, but not in CI."""

    def run(name: str, *arguments: object) -> str:
        found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if found is None and "CI" not in os.environ:
            pytest.skip(f"{name} is not installed: .ci/run and the extra `dev` bring it")
        assert found is not None, f"CI lacks {name}"
        done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def deployment(bundle: Path, repository: Path) -> Deployment:
    """The tiny run, as it would be deployed."""
    return collect_facts(Bundle.read(bundle), repository, model="ncd_global")


@pytest.fixture(scope="session")
def gpu_deployment(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """The same, exported for TensorRT, to be read from object storage."""
    from ncd_export.repository import add_to_repository
    from ncd_export.triton_config import Hardware

    folder = tmp_path_factory.mktemp("gpu") / "model_repository"
    add_to_repository(Bundle.read(bundle), folder, name="ncd_global", hardware=Hardware("tensorrt"))
    uri = "s3://https://storage.example.com:9000/birds/models"
    image = "registry.example.com:5000/team/birds:1.2"
    return collect_facts(Bundle.read(bundle), folder, model="ncd_global", image=image, repository_uri=uri)


@pytest.fixture(scope="session")
def rendered(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> dict[Target, Path]:
    """The folders of all three targets."""
    place = tmp_path_factory.mktemp("rendered")
    for target in Target:
        render(deployment, target, place / target.value)
    return {target: place / target.value for target in Target}
