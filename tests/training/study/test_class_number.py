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
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import parse_override, resolve_config
from ncd_training.config.schema import EstimateConfig, TrainConfig
from ncd_training.data import prepare as setup
from ncd_training.objective.class_cuts import Cut, equal_cut
from ncd_training.run import train as training
from ncd_training.study import class_features as probing
from ncd_training.study.class_features import draw_estimate
from ncd_training.study.class_number import (
    Estimate,
    Trial,
    balanced_estimate,
    dtc_estimate,
    gcd_estimate,
)
from PIL import Image
from rich.console import Console

from ncd_serve import progress
from ncd_serve.errors import DataError, UsageError
from tests.runs import SILENT, again, ready

QUIET = Console(quiet=True)
ESTIMATORS = {"dtc": dtc_estimate, "gcd": gcd_estimate}


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


@pytest.mark.parametrize("name", ["dtc", "gcd"])
@pytest.mark.parametrize("novel", [9, 3])
def test_separable_classes_are_counted(name: str, novel: int) -> None:
    found = estimate(name, blobs(10, novel), most=14, anchor_share=0.2, starts=2)
    # The largest of equal numbers counts, and one cluster too many may split a class that nobody looks at.
    assert abs(found.classes - novel) <= 1
    assert [trial.classes for trial in found.trials] == sorted({trial.classes for trial in found.trials})
    best = next(trial for trial in found.trials if trial.classes == novel)
    assert best.accuracy == pytest.approx(1.0)


def test_a_long_range_is_searched_coarse_to_fine() -> None:
    found = estimate("dtc", blobs(6, 9), most=100, starts=2)
    tried = {trial.classes for trial in found.trials}
    assert found.by_silhouette == 9
    assert tried >= {*range(0, 101, 8), 8, 9, 10}
    assert len(tried) < 35


def test_dtc_takes_the_middle_of_both_curves_and_drops_small_clusters() -> None:
    problem = blobs(6, 4)
    found = estimate("dtc", problem, most=12, starts=2, small_cluster=0.0)
    assert found.by_silhouette is not None
    middle = math.ceil((found.by_accuracy + found.by_silhouette) / 2)
    assert middle in {trial.classes for trial in found.trials}
    # clusters of anchors hold no unlabelled images; of the 4 blobs, the few that were split count only once
    assert found.classes >= 4 >= estimate("dtc", problem, most=12, starts=2, small_cluster=0.95).classes


@pytest.mark.parametrize("novel", [9, 3, 30])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_cut_counts_separable_classes_of_any_size(novel: int, share: float) -> None:
    probe, labels, unlabelled = blobs(10, novel)
    few = unlabelled.view(novel, 12, -1)[:, : round(12 * share)].flatten(0, 1)
    assert equal_cut(probe, labels, few, seed=0).classes == novel
    # the same, when every other class keeps all its images
    mixed = torch.cat([few, unlabelled.view(novel, 12, -1)[::2].flatten(0, 1)])
    assert equal_cut(probe, labels, mixed, seed=0).classes == novel


def test_a_cut_by_hand() -> None:
    labels = np.array([0, 0, 1, 1])
    probe = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    # Ward's joins of two rows cost their distance: 1 and 1; of the two pairs sqrt(2 * 2 * 2 / 4) * 10 = 14.14.
    # Two clusters are left by a cut at sqrt(14.14 * 1) = 3.76, three by one at sqrt(1 * 1).
    unlabelled = torch.tensor([[0.0], [3.0], [20.0], [24.0], [60.0]])
    # Joins: 3, 4, of the pairs sqrt(2) * 20.5 = 28.99, and of all with the last sqrt(2 * 4 / 5) * 48.25.
    # By average linkage, probes are joined at 1, 1, 10, so the cut is at 3.16; the others at 3, 4, 20.5, 48.25.
    cut = equal_cut(probe, labels, unlabelled, seed=0)
    assert cut == Cut(2, [4, 5], 4)
    assert cut.classes == 4
    estimate = balanced_estimate([cut, Cut(2, [5, 7], 4), Cut(2, [9, 9], 6)])
    assert estimate.classes == 5  # Ward's median; that of average linkage is 4
    assert balanced_estimate(estimate.cuts, equal=False).line == "about 4 novel classes (4 to 6)"
    assert estimate.line == "about 5 novel classes (4 to 8)"
    assert estimate.facts()["cuts"][0] == {"probes": 2, "curve": [4, 5], "by_average": 4, "classes": 4}


def test_small_classes_count_by_average_linkage() -> None:
    probe, labels, unlabelled = blobs(10, 12)
    sizes = [12, 12, 8, 5, 4, 3, 2, 2, 2, 2, 2, 2]
    tail = torch.cat([rows[:size] for rows, size in zip(unlabelled.view(12, 12, -1), sizes, strict=True)])
    assert balanced_estimate([equal_cut(probe, labels, tail, seed=0)]).classes == 12


def test_large_piles_are_thinned_alike() -> None:
    assert equal_cut(*blobs(10, 9), seed=0, at_most=60).classes == 9
    # so few are kept that a probe class would have none
    assert equal_cut(*blobs(10, 9), seed=0, at_most=10).probes == 10


FOUND = {
    "balanced": Estimate("balanced", 4, cuts=[Cut(3, [2, 4, 5, 7, 9], 4), Cut(3, [3, 4, 4, 6, 8], 5)]),
    "dtc": Estimate("dtc", 4, [Trial(0, 0.2, 0.1), Trial(4, 0.5, 0.3), Trial(8, 0.4, 0.2)], 4, 4),
    "gcd": Estimate("gcd", 4, [Trial(0, 0.2), Trial(4, 0.5), Trial(8, 0.4)], 4),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_curve_is_drawn(name: str, tmp_path: Path) -> None:
    draw_estimate(FOUND[name], tmp_path / "estimate.png")
    with Image.open(tmp_path / "estimate.png") as picture:
        assert min(picture.size) > 300


@pytest.fixture
def config(glyphs: Path, tiny_settings: list[str]) -> TrainConfig:
    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    more = {"data.root": str(glyphs), "data.novel_classes": "auto", "estimate.draws": 3}
    return resolve_config(recipes=["glyphs"], overrides={**settings, **more})


@pytest.mark.parametrize("cached_views", [0, 2])
def test_novel_labels_never_reach_the_estimate(
    cached_views: int, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.model_copy(update={"data": config.data.model_copy(update={"cache_views": cached_views})})
    seen = probing.estimate(ready(config), RunDir(tmp_path / "seen"), progress=SILENT)
    load = setup.load_manifest
    hidden = {"truth": None, "novel_test": (), "novel_classes": None, "novel_names": ()}
    monkeypatch.setattr(setup, "load_manifest", lambda *a, **k: replace(load(*a, **k), **hidden))
    assert probing.estimate(ready(config), RunDir(tmp_path / "hidden"), progress=SILENT) == seen


def test_auto_trains_with_the_estimate_and_a_resume_does_not_ask_again(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an over-estimate: more clusters than the five classes
    monkeypatch.setattr(probing, "_by_cuts", lambda *_: Estimate("balanced", 9, cuts=[Cut(2, [9], 9)]))
    prepared = ready(config)
    run = RunDir.create(tmp_path / "run", prepared.config)
    assert run.config().data.novel_classes == "auto"
    prepared = probing.with_first_look(prepared, run, progress=SILENT)
    training.train(prepared, run, progress=SILENT)
    assert json.loads(run.estimate.read_text())["classes"] == run.config().data.novel_classes == 9
    assert (run.plots / "estimate.png").exists()
    assert 0 < run.read_summary().scores["unlabelled-train"].acc <= 1
    reopened = again(run)
    assert reopened.clusters == 9
    training.train(reopened, run, progress=SILENT)


@pytest.mark.slow
def test_a_run_that_was_stopped_during_its_estimate_estimates_again(
    ncd: Any, config: TrainConfig, tmp_path: Path
) -> None:
    run = RunDir.create(tmp_path / "run", ready(config).config)
    refused = ncd("evaluate", run.path)
    assert refused.returncode == 3 and f"ncd-serve train --resume {run.path}" in " ".join(refused.stderr.split())
    done = ncd("train", "--resume", run.path)
    assert done.returncode == 0, done.stderr
    assert run.config().data.novel_classes == json.loads(run.estimate.read_text())["classes"]


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
        ready(resolve_config(overrides=overrides))


def test_a_number_of_classes_is_a_number_or_auto() -> None:
    for wrong in ("many", 1, -3):
        with pytest.raises(UsageError, match="novel_classes"):
            resolve_config(overrides={"data.novel_classes": wrong})


@pytest.mark.slow
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
