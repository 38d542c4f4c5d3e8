"""The next round of a bundle, without a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.errors import ServerError
from ncd_serve.progress import SILENT
from ncd_serve.studio import rounds
from ncd_serve.studio.candidates import NewImage, NewImages
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
