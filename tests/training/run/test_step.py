"""One step: what float16 makes infinite leaves nothing behind, and the figures of an epoch are those of its steps."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from ncd_training.base.precision import Precision
from ncd_training.config.resolve import resolve_config
from ncd_training.data.views import BatchPlan
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.objective.method import build_method
from ncd_training.run.step import TrainState, split_views, train_epoch, train_step
from torch import Tensor

KNOWN, NOVEL, LABELLED, UNLABELLED = 3, 2, 4, 4
CONFIG = resolve_config(
    recipes=["glyphs"],
    overrides={
        "data.novel_classes": NOVEL,
        "model.bank_size": 16,
        "model.dictionary_size": 32,
        "optim.labelled_batch": LABELLED,
        "optim.unlabelled_batch": UNLABELLED,
    },
)
LABELS = torch.arange(LABELLED) % KNOWN


def scaled_state(method: str = "dual") -> TrainState:
    """Gradients are scaled as float16 needs it, although everything is computed in float32."""
    torch.manual_seed(0)
    config = CONFIG
    if method == "dtc":
        overrides = {"data.novel_classes": NOVEL, "method.variant": "te"}
        config = resolve_config(recipes=["glyphs", "dtc"], overrides=overrides)
    parts = build_trunk("small_resnet", resolution=32)
    model = DualBranchModel(parts, known=KNOWN, novel=NOVEL, model=config.model, labels=config.pseudo_labels)
    objective = build_method(config, model, images=UNLABELLED, clusters=NOVEL)
    optimizer = torch.optim.SGD(model.branches.parameters(), 0.01)
    precision = Precision(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    return TrainState(model.train(), objective.train(), optimizer, precision)


def step(state: TrainState, *, factor: float = 1.0) -> dict[str, Tensor]:
    maps = torch.rand(2, LABELLED + UNLABELLED, 64, 8, 8, generator=torch.Generator().manual_seed(1)) * factor
    rows = torch.arange(UNLABELLED)
    return train_step(state, [*maps], LABELS, rows=rows, ramp=1.0, generator=torch.Generator().manual_seed(2))


def held(state: TrainState) -> dict[str, Tensor]:
    return deepcopy({**state.model.state_dict(), **state.method.state_dict()})


@pytest.mark.parametrize("method", ["dual", "dtc"])
def test_a_skipped_step_leaves_weights_and_memories_as_they_were(method: str) -> None:
    state = scaled_state(method)
    step(state)
    before = held(state)
    terms = step(state, factor=torch.inf)
    assert not all(math.isfinite(float(term)) for term in terms.values())
    after = held(state)
    assert [name for name, tensor in after.items() if not torch.equal(tensor, before[name])] == []
    assert all(term.isfinite() for term in step(state).values())


def test_training_recovers_when_the_very_first_step_is_skipped() -> None:
    state = scaled_state()
    step(state, factor=torch.inf)
    for _ in range(2):
        assert all(term.isfinite() for term in step(state).values())
    assert all(tensor.isfinite().all() for tensor in held(state).values())


def test_figures_of_an_epoch_are_sums_of_what_its_steps_return(monkeypatch: pytest.MonkeyPatch) -> None:
    state, seen = scaled_state(), []

    def watched(*rest: object, **more: object) -> dict[str, Tensor]:
        terms = train_step(*rest, **more)  # type: ignore[arg-type]
        seen.append({name: float(term) for name, term in terms.items()})
        return terms

    monkeypatch.setattr("ncd_training.run.step.train_step", watched)
    plan = BatchPlan(2 * LABELLED, 2 * UNLABELLED, LABELLED, UNLABELLED, seed=0)
    loader = [[*torch.rand(2, LABELLED + UNLABELLED, 64, 8, 8)] for _ in plan]
    figures = train_epoch(state, loader, plan, torch.arange(2 * LABELLED) % KNOWN, CONFIG)
    assert len(seen) == 2 and "distillation" not in seen[0]  # which waits for filled banks
    for name, value in figures.items():
        assert value == sum(terms[name] / 2 for terms in seen if name in terms)


def test_ranks_exchange_no_parts_of_the_second_view_and_no_gradient_of_the_first() -> None:
    state = scaled_state()
    maps = torch.rand(2 * (LABELLED + UNLABELLED), 64, 8, 8)
    first, second = split_views(state.model(maps))
    assert all(output.parts.numel() and not output.parts.requires_grad for output in first)
    assert [output.parts.numel() for output in second] == [0, 0]
    assert all(output.embedding.requires_grad for output in (*first, *second))
