"""A run on the user's own list of images, some of which cannot be used."""

from pathlib import Path
from typing import Any

import pytest

SMALL = [part for value in ("optim.epochs=1", "rotations.epochs=0", "model.weights=none") for part in ("--set", value)]


@pytest.fixture
def table(glyphs: Path, tmp_path: Path) -> Path:
    """Three known letters, two unknown ones with their true names, an empty file and a copy."""
    rows = ["path,label,split,true_label"]
    for split in ("train", "test"):
        for letter in "BCDAE":
            label, true = (letter, "") if letter in "BCD" else ("", letter)
            rows += [f"{path},{label},{split},{true}" for path in sorted((glyphs / split / letter).iterdir())]
    (tmp_path / "empty.png").touch()
    (tmp_path / "copy.png").write_bytes(next((glyphs / "train" / "B").iterdir()).read_bytes())
    rows += ["empty.png,,,A", "copy.png,,,A", "gone.png,,,E"]
    (tmp_path / "own.csv").write_text("\n".join(rows) + "\n")
    return tmp_path / "own.csv"


@pytest.mark.slow
def test_bad_images_are_left_out_and_listed(ncd: Any, table: Path, tiny_settings: list[str]) -> None:
    run = table.parent / "run"
    options = ["--manifest", table, "--novel-classes", 2, "--recipe", "glyphs", *tiny_settings, *SMALL]
    done = ncd("train", *options, "--out", run, cwd=table.parent)
    assert done.returncode == 0, done.stderr
    assert "12 labelled images of 3 known classes, 8 unlabelled images" in done.stderr.replace("\n", " ")
    lines = (run / "skipped.txt").read_text().splitlines()
    assert [line.split(": ")[1][:13] for line in lines] == ["the file is e", "same bytes as", "cannot be rea"]
    assert all(line in done.stderr.replace("\n", "") for line in lines)


def test_strict_data_stops_before_anything_is_written(ncd: Any, table: Path) -> None:
    options = ["--manifest", table, "--novel-classes", 2, "--recipe", "glyphs", "--strict-data"]
    done = ncd("train", *options, "--out", table.parent / "run", cwd=table.parent)
    assert done.returncode == 3, done.stderr
    assert "error: 3 images cannot be used" in done.stderr
    assert "empty.png: the file is empty" in done.stderr.replace("\n", "")
    assert "hint: remove or replace them" in done.stderr
    assert not (table.parent / "run").exists()
