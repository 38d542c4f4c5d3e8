"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ncd_training.summary import plots
from ncd_training.summary.plots import CurvePlots, Points, draw_curves, draw_tsne, tsne
from PIL import Image

RNG = np.random.default_rng(0)
ROWS = [
    {"epoch": 1, "distillation": 0.5, "consistency": 0.0},
    {"epoch": 2, "distillation": 0.4, "consistency": 0.1, "cluster_balance": 0.9, "pseudo_global_precision": 0.2},
]


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def test_curves_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    draw_curves(ROWS[:1], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["terms.png"]
    draw_curves(ROWS, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"terms.png", "quality.png", "pseudo-labels.png"}
    assert all(min(size(path)) > 300 for path in tmp_path.iterdir())


def test_curves_are_redrawn_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = CurvePlots(tmp_path)
    curves.follow(ROWS)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(plots, "_REDRAW_SECONDS", 0.0)
    curves.follow(ROWS)
    assert (tmp_path / "terms.png").exists()


def test_tsne_keeps_groups_apart_and_is_the_seeds_own() -> None:
    centres = np.eye(3, 64, dtype=np.float32)
    features = np.repeat(centres, 20, axis=0) + RNG.normal(0, 0.02, (60, 64)).astype(np.float32)
    places = tsne(features, seed=0).reshape(3, 20, 2)
    middles = places.mean(axis=1)
    spread = max(np.linalg.norm(group - middle, axis=1).max() for group, middle in zip(places, middles, strict=True))
    assert min(np.linalg.norm(middles[a] - middles[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 2 * spread
    np.testing.assert_array_equal(places.reshape(60, 2), tsne(features, seed=0))


@pytest.mark.parametrize("groups", [3, 40])
def test_tsne_of_any_number_of_groups(groups: int, tmp_path: Path) -> None:
    numbers = np.arange(80) % groups
    features = RNG.random((90, 8)).astype(np.float32)
    points = Points(features[:80], numbers, ["a name"], features[80:])
    draw_tsne(points, title="title", seed=0, target=tmp_path / "tsne.png")
    assert min(size(tmp_path / "tsne.png")) > 500


def test_four_images_can_be_drawn() -> None:
    assert tsne(RNG.random((4, 8)).astype(np.float32), seed=0).shape == (4, 2)
