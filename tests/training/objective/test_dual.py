"""Which terms there are, what they reach, and what the switches take away."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ncd_training.config.schema import CompatConfig, LossConfig, ModelConfig, PseudoLabelConfig
from ncd_training.model.branches import Branch, BranchOutput, Modules
from ncd_training.model.trunk import ConvTail
from ncd_training.objective.dual import DualObjective
from ncd_training.objective.losses import pairwise_bce
from ncd_training.objective.method import Batch

DIM, KNOWN, NOVEL, LABELLED, BATCH = 8, 3, 4, 5, 11


def make(model: Any = None, labels: Any = None, compat: Any = None, **loss: Any) -> DualObjective:
    model = {"dictionary_size": 32, "bank_size": 32, **(model or {})}
    return DualObjective(
        DIM,
        model=ModelConfig(**model),
        labels=PseudoLabelConfig(**(labels or {})),
        loss=LossConfig(**{"consistency_weight": 4.0, **loss}),
        compat=CompatConfig(**(compat or {})),
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


LABELS, ROWS = torch.tensor([0, 1, 2, 0, 1]), torch.arange(BATCH - LABELLED)


def run(objective: DualObjective, views: Any, branches: Modules[Branch], steps: int = 2) -> dict[str, torch.Tensor]:
    """The terms of the last step: the first one fills the memories."""
    for _ in range(steps):
        batch = Batch(*views, LABELS, ROWS, 0.5)
        terms = objective(batch)
        objective.remember(batch, branches=branches, generator=torch.Generator().manual_seed(0))
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
    positive, negative = objective.pseudo_labels[0](views[0][0], LABELS)
    assert positive.shape == (BATCH - LABELLED, BATCH - LABELLED)
    assert torch.equal(positive, negative)


def test_positive_and_negative_sources_can_differ(views: Any, branches: Modules[Branch]) -> None:
    objective = make(labels={"positives": "global", "negatives": "local", "global_top_k": 2, "local_top_k": 3})
    run(objective, views, branches)
    positive, negative = objective.pseudo_labels[0](views[0][0], LABELS)
    assert not torch.equal(positive, negative)
    plain = make(labels={"global_top_k": 2}).pseudo_labels[0](views[0][0], LABELS)
    assert torch.equal(positive, plain[0])


@pytest.mark.parametrize("sampling", ["random", "all", "cam"])
def test_dictionary_sampling(sampling: str, views: Any, branches: Modules[Branch]) -> None:
    objective = make(model={"dictionary_sampling": sampling, "dictionary_size": 500})
    objective.remember(Batch(*views, LABELS, ROWS, 0.5), branches=branches, generator=torch.Generator())
    pushed = int(objective.pseudo_labels[1].dictionary.pushed)
    assert pushed == (BATCH * 9 if sampling == "all" else BATCH)


def test_two_branches_of_a_kind_have_names_of_their_own() -> None:
    objective = make(model={"branches": "local+local"})
    assert [objective.branch_name(number) for number in range(2)] == ["local", "local2"]


def test_one_view_for_the_local_branch_is_the_released_code_s(views: Any, branches: Modules[Branch]) -> None:
    paper = run(make(), views, branches)
    released = run(make(compat={"local_views": "one"}), views, branches)
    first = views[0][1].cluster_logits[LABELLED:].softmax(1)
    judge = make().pseudo_labels[1]
    judge.remember(views[0][1], LABELS, branch=branches[1], generator=torch.Generator().manual_seed(0))
    assert released["pairwise_global"] == paper["pairwise_global"]
    assert released["pairwise_local"] == pairwise_bce(first, first, *judge(views[0][1], LABELS))


def test_the_paper_s_consistency_is_each_head_on_its_own_images(views: Any, branches: Modules[Branch]) -> None:
    term = run(make(consistency_form="paper"), views, branches)["consistency"]
    expected = torch.zeros(())
    for a, b in zip(*views, strict=True):
        known = (a.known_logits.softmax(1) - b.known_logits.softmax(1))[:LABELLED]
        clusters = (a.cluster_logits.softmax(1) - b.cluster_logits.softmax(1))[LABELLED:]
        expected = expected + known.square().sum() / LABELLED + clusters.square().sum() / (BATCH - LABELLED)
    torch.testing.assert_close(term, 4.0 * 0.5 * expected)


def wide(heads: Any, form: Any = "linear") -> tuple[Modules[Branch], Any]:
    torch.manual_seed(0)
    tails = [ConvTail(torch.nn.Conv2d(6, DIM, 1), torch.nn.ReLU()) for _ in range(2)]
    branches = Modules(Branch(tail, DIM, known=KNOWN, novel=NOVEL, heads=heads, form=form) for tail in tails)
    maps = torch.rand(2, BATCH, 6, 3, 3)
    return branches, ([branch(maps[0]) for branch in branches], [branch(maps[1]) for branch in branches])


def test_the_joint_head_learns_the_clusters_as_classes_of_its_own() -> None:
    branches, views = wide("joint")
    term = run(make(model={"heads": "joint"}, joint_weight=0.1), views, branches)["joint"]
    expected = sum(
        F.cross_entropy(a.known_logits[LABELLED:], KNOWN + a.cluster_logits[LABELLED:].argmax(1)) for a in views[0]
    )
    torch.testing.assert_close(term, 0.1 * 0.5 * expected)
    term.backward()
    assert branches[0].known_head.weight.grad[KNOWN:].abs().sum() > 0
    assert branches[0].cluster_head.weight.grad is None


def test_an_open_world_has_one_head_and_counts_it_once() -> None:
    branches, views = wide("open_world", "cosine")
    terms = run(make(model={"heads": "open_world"}, balance_weight=1.0), views, branches)
    assert views[0][0].known_logits is views[0][0].cluster_logits
    assert views[0][0].cluster_logits.shape == (BATCH, KNOWN + NOVEL)
    assert views[0][0].cluster_logits.abs().max() <= 10.0
    mse = sum(F.mse_loss(a.cluster_logits.softmax(1), b.cluster_logits.softmax(1)) for a, b in zip(*views, strict=True))
    torch.testing.assert_close(terms["consistency"], 2.0 * mse)
    assert terms["balance"] > 0
    assert {"pairwise_global", "pairwise_local", "cross_entropy"} <= set(terms)


def test_the_released_code_s_positive_column_reaches_the_banks_distribution(
    views: Any, branches: Modules[Branch]
) -> None:
    plain, positive = (run(make(bank_positive=flag), views, branches)["distillation"] for flag in (False, True))
    assert not torch.equal(plain, positive)


def test_the_gain_of_a_head_is_that_of_its_first_weights() -> None:
    plain, larger = (seeded_branch(gain) for gain in (1.0, 5.0))
    torch.testing.assert_close(larger.linear_cluster_head.weight, 5.0 * plain.linear_cluster_head.weight)
    torch.testing.assert_close(larger.labelled_head.weight, plain.labelled_head.weight)


def seeded_branch(gain: float) -> Branch:
    torch.manual_seed(0)
    return Branch(ConvTail(torch.nn.Identity()), DIM, known=KNOWN, novel=NOVEL, gain=gain)
