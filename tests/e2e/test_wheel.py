"""The built wheel in an environment of its own with no extras: what a user of a running service installs."""

from __future__ import annotations

import csv
import email
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ncd_serve import __version__
from ncd_serve.triton import TritonServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a release uploads: the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and its base dependencies, and pip finds none missing."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in base_dependencies(wheel):
        link_distribution(name, packages)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True, capture_output=True)
    checked = run(python, "-m", "pip", "check")
    assert checked.returncode == 0, checked.stdout
    return folder / "bin"


def base_dependencies(wheel: Path) -> set[str]:
    """Names of all distributions that the wheel needs without its extras, directly or not."""
    about = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"ncd_serve-{__version__}.dist-info/METADATA"))
    found: set[str] = set()
    wanted = [(Requirement(text), "") for text in about.get_all("Requires-Dist") or ()]
    while wanted:
        one, extra = wanted.pop()
        if one.marker and not one.marker.evaluate({"extra": extra}):
            continue
        new = {f"{one.name}[{extra}]" for extra in one.extras or {""}} - found
        found |= new
        texts = metadata.requires(one.name) or () if new else ()
        wanted += [(Requirement(text), extra) for text in texts for extra in one.extras or {""}]
    return {name.partition("[")[0] for name in found}


def link_distribution(name: str, packages: Path) -> None:
    """Put a distribution of the environment that runs the tests into another one: nothing is downloaded again."""
    home = Path(str(metadata.distribution(name).locate_file("")))
    files = metadata.files(name) or ()
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
        if not (packages / top).exists():
            (packages / top).symlink_to(home / top)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False, cwd="/")


def test_a_release_passes_the_checks_of_the_index(dist: Path, wheel: Path) -> None:
    files = sorted(map(str, dist.iterdir()))
    checked = run(sys.executable, "-m", "twine", "check", "--strict", *files)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout + checked.stderr
    about = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"ncd_serve-{__version__}.dist-info/METADATA"))
    assert {"train", "export", "triton", "studio"} <= {*(about.get_all("Provides-Extra") or ())}
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_holds_all_three_packages_and_their_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "ncd_serve/py.typed",
        "ncd_serve/triton/backend/model.py",
        "ncd_serve/triton/jpeg/model.py",
        "ncd_serve/deploy/files/helm/chart/templates/deployment.yaml.jinja",
        "ncd_serve/gallery/templates/gallery.css",
        "ncd_serve/studio/templates/studio.js",
        "ncd_training/config/recipes/glyphs.toml",
        "ncd_training/summary/templates/report.html.jinja",
        "ncd_training/summary/templates/report.css",
        "ncd_export/templates/model_card.md.jinja",
    ):
        assert name in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "ncd_serve",
        "ncd_training",
        "ncd_export",
    }


@pytest.mark.timeout(900)
def test_the_base_installation_works_without_torch(bare_bin: Path) -> None:
    assert run(bare_bin / "python", "-c", "import torch").returncode == 1
    assert "query" in run(bare_bin / "ncd-serve", "--help").stdout
    doctor = run(bare_bin / "ncd-serve", "doctor")
    assert doctor.returncode == 0 and "not installed" in doctor.stdout
    for command in ("train", "demo"):
        refused = run(bare_bin / "ncd-serve", command, *(("--dataset", "glyphs") if command == "train" else ()))
        assert refused.returncode == 6 and "pip install 'ncd-serve[" in refused.stderr
    refused = run(bare_bin / "ncd-serve", "query", ROOT, "--out", "rows.parquet")
    assert refused.returncode == 6 and "pip install 'ncd-serve[parquet]'" in refused.stderr, refused.stderr


@pytest.mark.timeout(900)
@pytest.mark.triton
def test_the_base_installation_queries_a_server(bare_bin: Path, server: TritonServer, glyphs: Path) -> None:
    done = run(bare_bin / "ncd-serve", "query", glyphs / "test" / "E", "--url", f"grpc://{server.grpc_url}")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert len(rows) == 2 and all(row["status"] == "ok" for row in rows)
