"""Folders that the form of a training offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncd_serve.errors import DataError
from ncd_serve.studio.folders import look_into, suggest_folders


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("birds/auk", "birds/gull", "bugs", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("birds/auk/1.png", "birds/auk/2.JPG", "birds/auk/notes.txt", "bugs/1.png"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_are_suggested_while_a_path_is_typed(here: Path) -> None:
    assert suggest_folders(f"{here}/b") == [f"{here}/birds", f"{here}/bugs"]
    assert suggest_folders(f"{here}/birds/") == [f"{here}/birds/auk", f"{here}/birds/gull"]
    assert suggest_folders(f"{here}/.h") == [f"{here}/.hidden"]
    assert suggest_folders(f"{here}/nothing/such") == []


def test_a_folder_is_looked_into(here: Path) -> None:
    found = look_into("")
    assert (found["path"], found["parent"], found["inside"], found["images"]) == (str(here), str(here.parent), 3, 0)
    birds, bugs = found["folders"]
    assert birds == {"name": "birds", "path": f"{here}/birds", "inside": 2, "images": 0} and bugs["images"] == 1
    assert look_into(f"{here}/birds/auk")["images"] == 2
    assert look_into(f"{here}/birds/owl/eggs")["path"] == f"{here}/birds", "the nearest one that is there"
    assert look_into("/")["parent"] == "/"


def test_a_folder_that_cannot_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        look_into(str(here))
