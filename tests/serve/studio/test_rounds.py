"""The next round of a bundle, without a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError, ServerError, UsageError
from ncd_serve.progress import SILENT
from ncd_serve.studio import rounds
from ncd_serve.studio.candidates import NewImage, NewImages
from ncd_serve.studio.desk import Desk
from ncd_serve.studio.start import open_desk
from tests.serve.patterns import KNOWN, draw, embedding, make_bundle, save


def test_a_round_that_cannot_be_exported_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.read(make_bundle(tmp_path / "bundle"))
    save(tmp_path / "new" / "auk", 20, 25)

    def fail(*_: str) -> str:
        raise ServerError("the disk is full")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "run_command", fail)
    with pytest.raises(ServerError):
        rounds.next_round(bundle, tmp_path / "new", progress=SILENT)
    assert not (tmp_path / "bundle-2").exists()
    monkeypatch.setattr(rounds, "run_command", lambda *_: "")
    grown = rounds.next_round(bundle, tmp_path / "new", progress=SILENT)
    assert Bundle.read(grown).manifest.cluster_names[3:] == ["auk"]
    desk = Desk("", "", SILENT)
    desk.open(tmp_path)
    assert desk.project.source.resolve() == grown.resolve(), "the newest generation of what was trained"


def test_new_images_of_one_name_are_both_kept_until_they_are_taken_back(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "run" / "bundle", cluster_names=["auk", "gull", "cluster-2"])
    desk = open_desk(bundle, address="", token="", progress=SILENT)
    one, other = (file.read_bytes() for file in save(tmp_path, 20, 2))
    kept = [Path(desk.keep_image(content, "tern", "IMG_1.png")) for content in (one, other, one)]
    assert [file.name for file in kept] == ["IMG_1.png", "IMG_1-2.png", "IMG_1.png"]
    assert [file.read_bytes() for file in kept] == [one, other, one]
    with pytest.raises(DataError, match="'auk' already"):
        desk.keep_image(one, "auk", "IMG_1.png")
    assert desk.waiting()["kept"] == {"tern": 2} and desk.waiting()["ready"] == {"tern": 2}
    (begun := rounds.next_run(Bundle.read(bundle))).mkdir()
    for refused in (lambda: desk.forget_category("tern"), desk.train_again):
        with pytest.raises(UsageError, match=begun.name):
            refused()
    begun.rmdir()
    desk.forget_category("tern")
    assert desk.waiting()["kept"] == {}
    for name in ("tern", ".."):
        with pytest.raises(DataError, match="no category"):
            desk.forget_category(name)


def test_candidates_are_of_one_page_and_copies_count_once(tmp_path: Path) -> None:
    bundle = Bundle.read(make_bundle(tmp_path / "bundle"))
    images = NewImages()
    assert images.candidates("page", bundle) == []
    for number, vector in enumerate(embedding(draw(20, 19))):
        images.keep(NewImage("page", number), vector)
        images.keep(NewImage("page", 100 + number), vector)
    assert images.candidates("page", bundle) == [], "twice nineteen are nineteen"
    for number, vector in enumerate(embedding(draw(KNOWN, 25))):
        images.keep(NewImage("page", 200 + number), vector)
    (found,) = images.candidates("page", bundle)
    assert {number % 100 for number in found["images"]} == set(range(19)) and found["nearest"]
    assert images.candidates("other page", bundle) == []
    images.keep(NewImage("other page", 0), vector)
    assert images.candidates("page", bundle) == []
