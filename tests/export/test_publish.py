"""Publishing by several processes at once, and by processes that are killed: nothing is lost, mixed or left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ncd_export.publish import Destination, publish, publishing
from ncd_export.rename import rename_bundle
from ncd_export.repository import add_to_repository

from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError
from ncd_serve.files import locked, staged_directory
from ncd_serve.naming import Names

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "publishing.py"


@pytest.fixture
def place(bundle: Path, tmp_path: Path) -> Path:
    """A folder with a bundle and a repository of its own."""
    add_to_repository(Bundle.read(bundle), tmp_path / "models", name="m")
    shutil.copytree(bundle, tmp_path / "bundle")
    return tmp_path


def rename(place: Path, name: str) -> tuple[Bundle, Path]:
    names = Names.model_validate({"clusters": {0: {"name": name}}})
    return rename_bundle(place / "bundle", names, repository=place / "models", name="m")


def served_names(place: Path, version: int) -> tuple[list[str], list[str]]:
    """The labels of the model, and the names that a version for image files has."""
    told = json.loads((place / "models" / "m_jpeg" / str(version) / "bundle.json").read_bytes())
    return (place / "models" / "m" / "labels.txt").read_text().splitlines(), told["cluster_names"]


def hidden(place: Path) -> list[Path]:
    return sorted(place.rglob(".*"))


def test_processes_at_once_and_processes_that_are_killed(bundle: Path) -> None:
    command = [sys.executable, str(BENCHMARK), str(bundle), "--concurrent", "5", "--killed", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 at once: 5 published, 0 lost, 0 left behind" in done.stdout


# The process ends itself as SIGKILL would, just before one of the steps.
KILLED = """
import os, sys
from pathlib import Path
from ncd_export import publish, rename, repository
from ncd_serve.naming import Names
place, module, step = Path(sys.argv[1]), {"publish": publish, "repository": repository}[sys.argv[2]], sys.argv[3]
setattr(module, step, lambda *_, **__: os._exit(9))
names = Names.model_validate({"clusters": {0: {"name": "killed"}}})
rename.rename_bundle(place / "bundle", names, repository=place / "models", name="m")
"""


@pytest.mark.parametrize(
    ("module", "step", "finished"),
    [
        ("repository", "add_jpeg_model", False),  # all is prepared
        ("repository", "swap_in", True),  # the version for image files is there, its model is not
        ("publish", "swap_in", True),  # the model is there, the bundle is not
    ],
)
def test_a_process_that_was_killed_has_published_all_or_nothing(
    place: Path, module: str, step: str, finished: bool
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(place), module, step], check=False)
    assert done.returncode == 9 and hidden(place)
    assert "killed" not in Bundle.read(place / "bundle").manifest.cluster_names, "a reader sees the old bundle, whole"
    names = Names.model_validate({"clusters": {1: {"name": "next"}}})
    renamed, version = rename_bundle(place / "bundle", names, repository=place / "models", name="m")
    assert version.name == ("3" if finished else "2")
    assert ("killed" in renamed.manifest.cluster_names) == finished
    labels, told = served_names(place, int(version.name))
    assert labels == told == renamed.manifest.cluster_names == Bundle.read(place / "bundle").manifest.cluster_names
    assert hidden(place) == []


def test_a_first_publishing_that_was_killed_does_not_block_the_next(bundle: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "models" / "m_jpeg" / ".m.0123abcd"
    leftover.mkdir(parents=True)
    (leftover / "config.pbtxt").write_text("half")
    assert add_to_repository(Bundle.read(bundle), tmp_path / "models", name="m").name == "1"
    assert hidden(tmp_path) == []


def test_who_publishes_waits_for_others(place: Path) -> None:
    with locked(place / "models", shared=True):  # as a server does while it loads
        waiting = threading.Thread(target=rename, args=(place, "patient"))
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive() and "patient" not in Bundle.read(place / "bundle").manifest.cluster_names
    waiting.join(60)
    assert Bundle.read(place / "bundle").manifest.cluster_names[0] == "patient"


def test_a_bundle_beside_its_repository_or_inside_it_does_not_wait_for_itself(bundle: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "models" / ".bundles" / "b", tmp_path / "b"):
        with publishing(out, tmp_path / "models"), staged_directory(out) as staged:
            shutil.copytree(bundle, staged, dirs_exist_ok=True)
            publish(staged, out, Destination(repository=tmp_path / "models", name="m"))
        assert Bundle.read(out).manifest == Bundle.read(bundle).manifest


def test_a_failure_removes_no_folder_that_was_there(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m_jpeg").mkdir()
    (tmp_path / "models" / "m_jpeg" / "config.pbtxt").write_text("somebody's own")
    with pytest.raises(DataError, match="was not made by ncd-serve"):
        add_to_repository(Bundle.read(bundle), tmp_path / "models", name="m")
    (tmp_path / "empty").mkdir()
    damaged = Bundle.read(bundle)
    with pytest.raises(FileNotFoundError):
        add_to_repository(Bundle(tmp_path / "nowhere", damaged.manifest), tmp_path / "empty", name="m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "models"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ncd_serve import bundle as module

    original, replaced = module.sha256, []

    def replace_first(path: Path) -> str:
        if not replaced:
            replaced.append(path)
            rename(place, "new")
        return original(path)

    monkeypatch.setattr(module, "sha256", replace_first)
    assert Bundle.read(place / "bundle").manifest.cluster_names[0] == "new"
