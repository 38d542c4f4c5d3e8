"""What a studio finds when it starts, without a browser."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ncd_serve import __version__
from ncd_serve.errors import DataError
from ncd_serve.files import held
from ncd_serve.progress import SILENT
from ncd_serve.studio.commands import Training, run_command
from ncd_serve.studio.start import open_desk
from tests.serve.small_gallery import make_run


def begin(run: Path, created: str) -> Path:
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    (run / "environment.json").write_text(json.dumps({"made_by": "train", "created": created}))
    return run


def test_a_run_that_another_process_trains_cannot_be_resumed(tmp_path: Path) -> None:
    training = Training(begin(tmp_path / "run", "2026-01-01"))
    assert training.state()["state"] == "stopped" and training.state()["resumable"]
    (tmp_path / "run" / "config.toml").unlink()
    assert not training.state()["resumable"], "it was stopped before it began"
    with held(tmp_path / "run") as free:
        assert free and training.state()["state"] == "elsewhere"
    make_run(tmp_path / "run")
    assert training.state()["state"] == "finished"
    training.stop()  # nothing of its own


def test_a_studio_shows_what_was_begun_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "runs" / "old", "2026-01-01")
    make_run(begin(tmp_path / "runs" / "birds", "2026-01-02"))
    desk = open_desk(None, address="", token="", progress=SILENT)
    assert desk.project.source == Path("runs/birds") and desk.training is None
    begin(tmp_path / "runs" / "terns", "2026-01-03")
    desk = open_desk(None, address="", token="", progress=SILENT)
    assert desk.opened and desk.training == Training(Path("runs/terns"))
    desk = open_desk(Path("runs/old"), address="", token="", progress=SILENT)
    assert desk.opened is None and desk.training == Training(Path("runs/old"))
    desk.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11")
def test_commands_import_nothing_from_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rich.py").write_text("raise SystemExit('a file beside the images was run')")
    monkeypatch.chdir(tmp_path)
    assert run_command("--version").strip().endswith(__version__)


def test_images_that_were_moved_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "images").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="none of the images") as refused:
        open_desk(run, address="", token="", progress=SILENT)
    assert refused.value.hint and "--images DIR" in refused.value.hint
    desk = open_desk(run, images=tmp_path / "moved", address="", token="", progress=SILENT)
    assert desk.project.file(0).is_file() and desk.project.file(0).is_relative_to(tmp_path / "moved")
