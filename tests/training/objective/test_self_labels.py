"""Heads that start from a clustering: in a real run, and that a resumed run makes the same targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import parse_override, resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.data.views import Views
from ncd_training.model.branches import Branch
from ncd_training.model.trunk import ConvTail
from ncd_training.objective.method import Lesson, Material
from ncd_training.objective.self_labels import Space, _start_head, due, mixed_targets, with_clusters
from ncd_training.run import train as training
from ncd_training.score.metrics import cluster_accuracy
from rich.console import Console
from safetensors.torch import load_file

from tests.runs import SILENT, ready

QUIET = Console(quiet=True)


@pytest.fixture
def config(glyphs: Path, tiny_settings: list[str]) -> TrainConfig:
    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    more = {
        "data.root": str(glyphs),
        "data.cache_views": 3,
        "optim.epochs": 4,
        "self_labels.weight": 1.0,
        "self_labels.views": 2,
    }
    return resolve_config(recipes=["glyphs"], overrides={**settings, **more})


@pytest.mark.slow
def test_targets_are_made_taught_and_made_again_alike_after_an_interruption(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = ready(config)
    whole = RunDir.create(tmp_path / "whole", prepared.config)
    training.train(prepared, whole, progress=SILENT)
    saved = load_file(whole.checkpoint)
    targets = saved["objective.targets"]
    assert targets.shape == (20, 5)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(20))
    assert all("self_labels" in row for row in whole.read_metrics())

    train_epoch = training.train_epoch

    def interrupted(state: Any, *rest: Any) -> Any:
        if state.epoch == 3:
            raise KeyboardInterrupt
        return train_epoch(state, *rest)

    monkeypatch.setattr(training, "train_epoch", interrupted)
    parts = RunDir.create(tmp_path / "parts", prepared.config)
    with pytest.raises(KeyboardInterrupt):
        training.train(prepared, parts, progress=SILENT)
    monkeypatch.setattr(training, "train_epoch", train_epoch)
    training.train(prepared, parts, progress=SILENT)
    again = load_file(parts.checkpoint)
    assert [name for name in saved if not torch.equal(saved[name], again[name])] == []


@pytest.mark.parametrize("heads", ["separate", "open_world"])
def test_the_supervised_stage_learns_the_surest_clusters_too(heads: str) -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(12)
    labels, hidden = torch.arange(10).repeat(20), torch.tensor([10, 11]).repeat_interleave(20)
    features = torch.cat([centres[labels], centres[hidden]]) + torch.randn(240, 12, generator=generator)
    overrides = {"data.novel_classes": 2, "model.heads": heads}
    config = resolve_config(overrides=overrides)
    material = Material(Views(), labels, [Path("x")] * 40, config, SILENT.track)
    lesson = with_clusters(Lesson(np.arange(200), labels), features, labels, material)
    assert lesson.rows[:200].tolist() == list(range(200)) and torch.equal(lesson.classes[:200], labels)
    assert len(lesson.rows) == 200 + 28  # 70% of the unlabelled images
    found = lesson.classes[200:].numpy()
    assert set(found) == {10, 11}
    assert cluster_accuracy(found - 10, hidden.numpy()[lesson.rows[200:] - 200] - 10) == 1.0
    none = material.config.self_labels.model_copy(update={"stage_share": 0.0})
    material = replace(material, config=config.model_copy(update={"self_labels": none}))
    assert len(with_clusters(Lesson(np.arange(200), labels), features, labels, material).rows) == 200


def test_a_new_head_measures_the_cosine_to_its_cluster_s_centre() -> None:
    torch.manual_seed(0)
    embedding, transform = torch.rand(40, 6), torch.rand(6, 6)
    moved = embedding @ transform
    unit = F.normalize(moved - moved.mean(0), dim=1)
    space = Space(transform, moved.mean(0), unit[:0], unit)
    targets = F.one_hot(torch.arange(40) % 4, 4).float()
    branch = Branch(ConvTail(), 6, known=3, novel=4)
    _start_head(branch.linear_cluster_head, space, embedding, targets, torch.zeros(0, 4))
    centres = F.normalize(targets.T @ space.directions, dim=1)
    length = (moved - space.centre).norm(dim=1)
    expected = 10.0 * (space.directions @ centres.T) * (length / length.mean()).unsqueeze(1)
    torch.testing.assert_close(branch.cluster_head(embedding), expected, atol=1e-3, rtol=1e-3)


def test_when_targets_are_due(config: TrainConfig) -> None:
    assert [due(config, epoch) for epoch in range(4)] == [False, False, True, False]  # the first are made before
    assert not due(TrainConfig(), 2)


def drawn(classes: int, per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of well separated classes, and their numbers."""
    torch.manual_seed(1)
    truth = torch.arange(classes).repeat_interleave(per_class)
    return torch.randn(classes, 24)[truth] + 0.25 * torch.randn(len(truth), 24), truth


def test_known_classes_among_the_unlabelled_images_are_targets_by_name() -> None:
    features, truth = drawn(9, 30)
    labelled = (truth < 5) & (torch.arange(len(truth)) % 3 > 0)  # a third of each known class is not labelled
    ordered = torch.cat([features[labelled], features[~labelled]])
    config = resolve_config(recipes=["own-images"], overrides={"data.novel_classes": 4})
    targets = mixed_targets([ordered], truth[labelled], 4, config)
    true, found = truth[~labelled], targets.argmax(dim=1)
    assert targets.shape == (len(true), 9)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(len(true)))
    assert torch.equal(found[true < 5], true[true < 5])
    assert cluster_accuracy(found.numpy(), true.numpy()) == 1.0
    # no weight of a recognised image on clusters, nor of a clustered one on classes
    assert not targets[true < 5][:, 5:].any() and not targets[true >= 5][:, :5].any()
