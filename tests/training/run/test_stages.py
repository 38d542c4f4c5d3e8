"""What happens before the branches part."""

from __future__ import annotations

from pathlib import Path

import torch
from ncd_training.config.resolve import resolve_config
from ncd_training.data.views import FileViews
from ncd_training.model.weights import initial_trunk
from ncd_training.run.stages import Stages
from ncd_training.run.state import build_state

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


def test_a_quick_run_learns_from_labels_quickly() -> None:
    assert resolve_config(recipes=["cub200", "from-labels"]).from_labels.epochs == 200
    assert resolve_config(recipes=["cub200", "from-labels", "quick"]).from_labels.epochs == 6
