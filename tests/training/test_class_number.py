"""The number of novel classes: estimators on problems with a known answer, and the command around them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ncd_training import probing, progress, setup
from ncd_training import train as training
from ncd_training.class_number import Estimate, Trial, balanced_estimate, dtc_estimate, gcd_estimate, pair_score
from ncd_training.config import EstimateConfig, TrainConfig
from ncd_training.plots import draw_estimate
from ncd_training.resolve import parse_override, resolve_config
from ncd_training.run_dir import RunDir
from PIL import Image
from rich.console import Console

from ncd_serve.errors import DataError, UsageError

QUIET = Console(quiet=True)
ESTIMATORS = {"balanced": balanced_estimate, "dtc": dtc_estimate, "gcd": gcd_estimate}


def blobs(known: int, novel: int, per_class: int = 12, dim: int = 32) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Unit rows of labelled and unlabelled images, well apart."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(known + novel).repeat_interleave(per_class)
    centres = torch.randn(known + novel, dim, generator=generator)
    rows = F.normalize(centres[truth] + 0.1 * torch.randn(len(truth), dim, generator=generator), dim=1)
    cut = known * per_class
    return rows[:cut], truth[:cut].numpy(), rows[cut:]


def estimate(name: str, problem: tuple[Any, Any, Any], *, most: int = 30, **settings: Any) -> Estimate:
    return ESTIMATORS[name](*problem, EstimateConfig(**settings), most=most, seed=0, track=progress.silent)


@pytest.mark.parametrize(("name", "off"), [("balanced", 0), ("dtc", 1), ("gcd", 1)])
@pytest.mark.parametrize("novel", [9, 3])
def test_separable_classes_are_counted(name: str, off: int, novel: int) -> None:
    # The largest of equal numbers counts, and one cluster too many may split a class that nobody looks at.
    found = estimate(name, blobs(10, novel), most=14, anchor_share=0.2, starts=2)
    assert abs(found.classes - novel) <= off
    assert [trial.classes for trial in found.trials] == sorted({trial.classes for trial in found.trials})
    best = next(trial for trial in found.trials if trial.classes == novel)
    assert best.accuracy == pytest.approx(1.0)


def test_a_long_range_is_searched_coarse_to_fine() -> None:
    found = estimate("balanced", blobs(6, 9), most=100, starts=2)
    tried = {trial.classes for trial in found.trials}
    assert found.classes == 9
    assert tried >= {*range(0, 101, 8), 8, 9, 10}
    assert len(tried) < 30


def test_dtc_takes_the_middle_of_both_curves_and_drops_small_clusters() -> None:
    problem = blobs(6, 4)
    found = estimate("dtc", problem, most=12, starts=2, small_cluster=0.0)
    assert found.by_silhouette is not None
    middle = math.ceil((found.by_accuracy + found.by_silhouette) / 2)
    assert middle in {trial.classes for trial in found.trials}
    # clusters of anchors hold no unlabelled images; of the 4 blobs, the few that were split count only once
    assert found.classes >= 4 >= estimate("dtc", problem, most=12, starts=2, small_cluster=0.95).classes


def test_pair_score_by_hand() -> None:
    labels = np.array([0, 0, 1, 1])
    assert pair_score(np.array([0, 0, 1, 1, 2, 2]), labels) == 1.0
    # an unlabelled image with class 0: of 4 pairs called alike 2 are, and both pairs that are alike are found
    assert pair_score(np.array([0, 0, 1, 1, 0, 2]), labels) == pytest.approx(2 * 2 / (4 + 2))
    # class 1 is split: 1 pair called alike, 1 of 2 found
    assert pair_score(np.array([0, 0, 1, 2, 3, 3]), labels) == pytest.approx(2 * 1 / (1 + 2))


@pytest.mark.parametrize("silhouette", [None, 4])
def test_the_curve_is_drawn(silhouette: int | None, tmp_path: Path) -> None:
    trials = [Trial(0, 0.2, 0.1), Trial(4, 0.5, 0.3), Trial(8, 0.4, 0.2)]
    draw_estimate(Estimate("dtc", 4, trials, 4, silhouette), tmp_path / "estimate.png")
    with Image.open(tmp_path / "estimate.png") as picture:
        assert min(picture.size) > 300


@pytest.fixture
def config(glyphs: Path, tiny_settings: list[str]) -> TrainConfig:
    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    more = {"data.root": str(glyphs), "data.novel_classes": "auto", "estimate.most": 8, "estimate.starts": 2}
    return resolve_config(recipes=["glyphs"], overrides={**settings, **more})


@pytest.mark.parametrize("cached_views", [0, 2])
def test_novel_labels_never_reach_the_estimate(
    cached_views: int, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.model_copy(update={"data": config.data.model_copy(update={"cache_views": cached_views})})
    seen = probing.estimate(setup.prepare(config, QUIET), RunDir(tmp_path / "seen"))
    load = setup.load_manifest
    hidden = {"truth": None, "novel_test": (), "novel_classes": None, "novel_names": ()}
    monkeypatch.setattr(setup, "load_manifest", lambda *a, **k: replace(load(*a, **k), **hidden))
    assert probing.estimate(setup.prepare(config, QUIET), RunDir(tmp_path / "hidden")) == seen


def test_auto_trains_with_the_estimate_and_a_resume_does_not_ask_again(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an over-estimate: more clusters than the five classes
    found = Estimate("balanced", 9, [Trial(9, 1.0)], 9)
    monkeypatch.setattr(probing, "_ESTIMATORS", {"balanced": lambda *a, **k: found})
    prepared = setup.prepare(config, QUIET)
    run = RunDir.create(tmp_path / "run", prepared.config)
    assert run.config().data.novel_classes == "auto"
    prepared = probing.with_estimate(prepared, run)
    training.train(prepared, run)
    assert json.loads(run.estimate.read_text())["classes"] == run.config().data.novel_classes == 9
    assert (run.plots / "estimate.png").exists()
    assert 0 < run.read_summary()["scores"]["unlabelled-train"]["acc"] <= 1
    again = setup.prepare(run.config(), QUIET)
    assert again.clusters == 9
    training.resume(again, run)


def images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng([len(folder.name), number]).integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.mark.parametrize(
    ("known", "per_class", "unlabelled", "most", "message"),
    [
        (1, 3, 8, None, "only one known class"),
        (3, 3, 8, None, "3 known classes are too few"),
        (4, 1, 8, None, "fewer than 2 images"),
        (4, 3, 3, None, "3 unlabelled images are too few"),
        (4, 3, 8, 9, "9 clusters, but only 8 unlabelled images"),
    ],
)
def test_what_cannot_be_estimated_is_said_before_any_work(
    known: int, per_class: int, unlabelled: int, most: int | None, message: str, tmp_path: Path
) -> None:
    for number in range(known):
        images(tmp_path / "labelled" / ("a" * (number + 1)), per_class)
    images(tmp_path / "pile-of-images", unlabelled)
    places = {"data.labelled": str(tmp_path / "labelled"), "data.unlabelled": str(tmp_path / "pile-of-images")}
    overrides = {**places, "data.novel_classes": "auto", "estimate.most": most}
    with pytest.raises(DataError, match=message):
        setup.prepare(resolve_config(overrides=overrides), QUIET)


def test_a_number_of_classes_is_a_number_or_auto() -> None:
    for wrong in ("many", 1, -3):
        with pytest.raises(UsageError, match="novel_classes"):
            resolve_config(overrides={"data.novel_classes": wrong})


def test_the_command_answers(ncd: Any, glyphs: Path, tiny_settings: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "curve"
    options = ["--dataset", "glyphs", "--data-root", glyphs, "--most", "8", *tiny_settings]
    done = ncd("estimate-k", *options, "--estimator", "dtc", "--out", folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads((folder / "estimate.json").read_text())
    assert f"about {facts['classes']} novel classes" in done.stdout
    assert f"--novel-classes {facts['classes']}" in done.stdout
    assert facts["estimator"] == "dtc"
    assert not (folder / "cache").exists()
    again = ncd("estimate-k", *options, "--estimator", "dtc", "--out", folder)
    assert again.returncode == 2
    assert "choose another --out" in again.stderr
