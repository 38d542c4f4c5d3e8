"""The first look at a pile: what it decides, that it decides without true classes, and what it says."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import resolve_config
from ncd_training.data.manifest import Manifest, from_csv
from ncd_training.data.prepare import Setup, list_images
from ncd_training.study import class_features
from ncd_training.study.class_number import Estimate
from rich.console import Console

from ncd_serve.errors import DataError
from ncd_serve.progress import Progress, silent

KNOWN, LABELLED_EACH = 12, 15


def setup_of(true: list[int], *, known: int = KNOWN) -> Setup:
    labelled = [(Path(f"{number}-{copy}.png"), number) for number in range(known) for copy in range(LABELLED_EACH)]
    pile = [Path(f"pile-{number}.png") for number in range(len(true))]
    manifest = Manifest("pile", labelled, pile, [f"class {number}" for number in range(known)], None)
    settings = {"data.novel_classes": "auto", "data.labelled": "known", "data.unlabelled": "pile"}
    return Setup(resolve_config(recipes=["own-images"], overrides=settings), manifest)


def look_at(
    true: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, known: int = KNOWN
) -> tuple[Setup, RunDir, str]:
    """Look at a pile of these true classes, whose features are well separated; also return what was said."""
    setup, rng = setup_of(true, known=known), np.random.default_rng(0)
    numbers = np.array([*setup.labels, *true])
    features = rng.normal(size=(40, 32))[numbers] + 0.3 * rng.normal(size=(len(numbers), 32))
    monkeypatch.setattr(class_features, "_embed", lambda *_: torch.from_numpy(features).float())
    run, said = RunDir.create(tmp_path / "run", setup.config), io.StringIO()
    found = class_features.with_first_look(setup, run, progress=Progress(Console(file=said, width=200)))
    return found, run, said.getvalue()


def classes(*numbers: int, each: int = 15) -> list[int]:
    return [number for number in numbers for _ in range(each)]


def test_a_novel_pile_keeps_its_clusters_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, run, said = look_at(classes(*range(20, 28)), tmp_path, monkeypatch)
    assert (found.config.data.pile, found.config.model.heads) == ("novel", "separate")
    assert found.config.data.novel_classes == 8 == found.clusters
    assert "novel classes only" in said and "about 8 novel classes" in said
    assert run.config() == found.config  # a resumed run does not look again


def test_known_classes_in_the_pile_get_a_head_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, said = look_at(classes(*range(12), *range(20, 28)), tmp_path, monkeypatch)
    assert (found.config.data.pile, found.config.model.heads) == ("mixed", "open_world")
    assert found.config.data.novel_classes == 8
    assert "of the 300 unlabelled images show known classes" in said


def test_a_pile_of_known_classes_has_nothing_to_discover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nothing to discover"):
        look_at(classes(*range(12)), tmp_path / "none", monkeypatch)
    monkeypatch.setattr(class_features, "surely_novel", lambda _: torch.tensor([7]))
    with pytest.raises(DataError, match="all but 1 of the unlabelled images seem to show known classes"):
        look_at(classes(*range(12)), tmp_path / "one", monkeypatch)


def test_few_known_classes_tell_nothing_about_the_pile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_features, "estimate", lambda *_, **__: Estimate("balanced", 4))
    found, _, said = look_at(classes(0, 1, *range(20, 24)), tmp_path, monkeypatch, known=2)
    assert found.config.data.pile == "novel"
    assert "2 known classes are too few" in said and "--pile mixed" in said


def test_true_classes_in_a_csv_file_do_not_decide(tmp_path: Path) -> None:
    lines = [
        "path,label,split,true_label",
        "a.png,gull,train,",
        "b.png,tern,train,",
        "c.png,,train,gull",
        "d.png,,train,auk",
    ]
    (tmp_path / "pile.csv").write_text("\n".join(lines))
    manifest = from_csv(tmp_path / "pile.csv")
    # for reports, known classes come first: gull 0, tern 1, auk 2
    assert manifest.open_world and manifest.truth == [0, 2] and manifest.novel_names == ("gull", "tern", "auk")
    config = resolve_config(overrides={"data.manifest": str(tmp_path / "pile.csv"), "data.novel_classes": 2})
    listed = list_images(config, track=silent)
    assert listed.config.data.pile == "novel"
    hidden = replace(listed, manifest=replace(manifest, truth=None, open_world=False))
    assert hidden.clusters == listed.clusters == 2
