"""What happens before the branches part."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from ncd_training.base.precision import Precision
from ncd_training.config.resolve import resolve_config
from ncd_training.data.views import FileViews
from ncd_training.model.weights import initial_trunk
from ncd_training.pretext import Stages
from ncd_training.run.step import build_state

from ncd_serve import progress
from tests.runs import ready


def test_without_self_supervision_the_known_classes_teach_trunk_and_tail(glyphs: Path) -> None:
    settings = {"data.root": str(glyphs), "data.workers": 0, "from_labels.epochs": 1, "from_labels.batch": 16}
    setup = ready(resolve_config(recipes=["glyphs", "from-labels"], overrides=settings))
    model = build_state(setup, initial_trunk(setup.config, weights=None)[0]).model
    before = [weight.clone() for weight in model.trunk.stages.parameters()]
    views = FileViews(setup.manifest.images, setup.config.data)
    Stages(model, setup.config, progress.silent).from_labels(views, torch.tensor(setup.labels))
    after = list(model.trunk.stages.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not model.trunk.stages.training and not any(weight.requires_grad for weight in after)
    first, second = (branch.tail.state_dict() for branch in model.branches)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_stages_compute_in_the_precision_that_the_device_has(glyphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {"epochs": 1, "batch": 16}
    settings = {"data.root": str(glyphs), "data.workers": 0, "rotations": stage, "supervised": stage}
    setup = ready(resolve_config(recipes=["glyphs"], overrides=settings))
    model = build_state(setup, initial_trunk(setup.config, weights=None)[0]).model
    scalers, contexts = [], []

    def on(device: torch.device, *, mixed: bool) -> Precision:
        assert mixed and device == model.device
        scalers.append(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1))
        return Precision(torch.bfloat16, scalers[-1])

    def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
        contexts.append(precision.dtype)
        return nullcontext()

    monkeypatch.setattr(Precision, "on", on)
    monkeypatch.setattr(Precision, "autocast", autocast)
    stages, views = Stages(model, setup.config, progress.silent), FileViews(setup.manifest.images, setup.config.data)
    stages.rotations(views, len(setup.manifest.images))
    stages.supervised(views, torch.tensor(setup.labels))
    steps = len(setup.manifest.images) // 16, len(setup.labels) // 16
    assert contexts == [torch.bfloat16] * sum(steps)
    # Every step was made with scaled gradients: the scale doubles after each.
    assert [scaler.get_scale() for scaler in scalers] == [4.0 * 2.0**number for number in steps]


@pytest.mark.parametrize("heads", ["separate", "open_world"])
def test_clusters_of_a_lesson_train_the_cluster_head(heads: str, glyphs: Path) -> None:
    stage = {"epochs": 1, "batch": 16}
    settings = {"data.root": str(glyphs), "data.workers": 0, "supervised": stage, "model.heads": heads}
    setup = ready(resolve_config(recipes=["glyphs"], overrides=settings))
    model = build_state(setup, initial_trunk(setup.config, weights=None)[0]).model
    branch, classes = model.branches[0], torch.tensor(setup.labels)
    before = branch.linear_cluster_head.weight.detach().clone()
    classes[-20:] = branch.known + 1  # as if they were of a cluster
    views = FileViews(setup.manifest.images, setup.config.data)
    Stages(model, setup.config, progress.silent).supervised(views, classes)
    assert not torch.equal(before, branch.linear_cluster_head.weight)


def test_a_quick_run_learns_from_labels_quickly() -> None:
    assert resolve_config(recipes=["cub200", "from-labels"]).from_labels.epochs == 200
    assert resolve_config(recipes=["cub200", "from-labels", "quick"]).from_labels.epochs == 6
