"""Which terms there are, what they reach, and what the switches take away."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ncd_training.config import LossConfig, ModelConfig, PseudoLabelConfig
from ncd_training.dual_branch import Branch, BranchOutput
from ncd_training.modules import Modules
from ncd_training.objective import Objective
from ncd_training.trunk import ConvTail

DIM, KNOWN, NOVEL, LABELLED, BATCH = 8, 3, 4, 5, 11


def make(kinds: Any = ("global", "local"), model: Any = None, labels: Any = None, **loss: Any) -> Objective:
    model = {"dictionary_size": 32, "bank_size": 32, **(model or {})}
    return Objective(
        list(kinds),
        DIM,
        model=ModelConfig(**model),
        labels=PseudoLabelConfig(**(labels or {})),
        loss=LossConfig(**loss),
    )


@pytest.fixture
def branches() -> Modules[Branch]:
    torch.manual_seed(0)
    tail = [ConvTail(torch.nn.Conv2d(6, DIM, 1), torch.nn.ReLU()) for _ in range(2)]
    return Modules(Branch(part, DIM, known=KNOWN, novel=NOVEL) for part in tail)


@pytest.fixture
def views(branches: Modules[Branch]) -> tuple[list[BranchOutput], list[BranchOutput]]:
    maps = torch.rand(2, BATCH, 6, 3, 3)
    return [branch(maps[0]) for branch in branches], [branch(maps[1]) for branch in branches]


LABELS = torch.tensor([0, 1, 2, 0, 1])


def run(objective: Objective, views: Any, branches: Modules[Branch], steps: int = 2) -> dict[str, torch.Tensor]:
    """The terms of the last step: the first one fills the memories."""
    for _ in range(steps):
        terms = objective(*views, LABELS, consistency_weight=2.0)
        objective.remember(views[0], LABELS, branches=branches, generator=torch.Generator().manual_seed(0))
    return terms


def test_the_five_terms(views: Any, branches: Modules[Branch]) -> None:
    terms = run(make(), views, branches)
    assert set(terms) == {"pairwise_global", "pairwise_local", "distillation", "cross_entropy", "consistency"}
    first, second = views
    expected = sum(F.cross_entropy(output.known_logits[:LABELLED], LABELS) for output in first)
    torch.testing.assert_close(terms["cross_entropy"], expected)
    mse = sum(
        F.mse_loss(a.known_logits.softmax(1), b.known_logits.softmax(1))
        + F.mse_loss(a.cluster_logits.softmax(1), b.cluster_logits.softmax(1))
        for a, b in zip(first, second, strict=True)
    )
    torch.testing.assert_close(terms["consistency"], 2.0 * mse)


def test_distillation_waits_for_the_banks(views: Any, branches: Modules[Branch]) -> None:
    assert "distillation" not in run(make(), views, branches, steps=1)


@pytest.mark.parametrize("term", ["pairwise", "distillation", "cross_entropy", "consistency"])
def test_every_term_can_be_switched_off(term: str, views: Any, branches: Modules[Branch]) -> None:
    assert not [name for name in run(make(**{term: False}), views, branches) if name.startswith(term)]


@pytest.mark.parametrize(
    ("term", "moved", "unmoved"),
    [
        ("pairwise_global", [(0, "tail"), (0, "cluster_head")], [(0, "known_head"), (1, "tail"), (1, "cluster_head")]),
        ("pairwise_local", [(1, "tail"), (1, "cluster_head")], [(1, "known_head"), (0, "tail"), (0, "cluster_head")]),
        ("distillation", [(0, "tail"), (1, "tail")], [(0, "cluster_head"), (1, "known_head")]),
        ("cross_entropy", [(0, "known_head"), (1, "known_head"), (1, "tail")], [(0, "cluster_head")]),
        ("consistency", [(0, "known_head"), (0, "cluster_head"), (1, "tail")], []),
    ],
)
def test_where_gradients_flow(term: str, moved: Any, unmoved: Any, views: Any, branches: Modules[Branch]) -> None:
    run(make(), views, branches)[term].backward()

    def gradient(number: int, part: str) -> float:
        parameters = getattr(branches[number], part).parameters()
        return sum(float(p.grad.abs().sum()) for p in parameters if p.grad is not None)

    assert all(gradient(*place) > 0 for place in moved)
    assert all(gradient(*place) == 0 for place in unmoved)


def test_only_unlabelled_images_are_paired(views: Any, branches: Modules[Branch]) -> None:
    objective = make()
    positive, negative = objective.pseudo_labels(0, views[0][0], LABELLED)
    assert positive.shape == (BATCH - LABELLED, BATCH - LABELLED)
    assert torch.equal(positive, negative)


def test_positive_and_negative_sources_can_differ(views: Any, branches: Modules[Branch]) -> None:
    objective = make(labels={"positives": "global", "negatives": "local", "global_top_k": 2, "local_top_k": 3})
    run(objective, views, branches)
    positive, negative = objective.pseudo_labels(0, views[0][0], LABELLED)
    assert not torch.equal(positive, negative)
    plain = make(labels={"global_top_k": 2}).pseudo_labels(0, views[0][0], LABELLED)
    assert torch.equal(positive, plain[0])


@pytest.mark.parametrize("sampling", ["random", "all", "cam"])
def test_dictionary_sampling(sampling: str, views: Any, branches: Modules[Branch]) -> None:
    objective = make(model={"dictionary_sampling": sampling, "dictionary_size": 500})
    objective.remember(views[0], LABELS, branches=branches, generator=torch.Generator())
    pushed = int(objective.dictionaries[1].pushed)
    assert pushed == (BATCH * 9 if sampling == "all" else BATCH)


def test_two_branches_of_a_kind_have_names_of_their_own() -> None:
    objective = make(kinds=("local", "local"))
    assert [objective.branch_name(number) for number in range(2)] == ["local", "local2"]
