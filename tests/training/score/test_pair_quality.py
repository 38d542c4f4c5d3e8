"""Quality of pseudo labels on numbers worked by hand, and that measuring it moves nothing."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from ncd_training.config.schema import LossConfig, ModelConfig, PseudoLabelConfig
from ncd_training.model.branches import BranchOutput
from ncd_training.objective.dual import DualObjective
from ncd_training.objective.pseudo_labels import ranking_scores
from ncd_training.score.pair_quality import PairProbe, pair_quality, sample_rows, score_variants

DIM, IMAGES = 6, 10
# Classes 0 0 1 1: the pairs (0,1) and (2,3) are of one class, (0,2) (0,3) (1,2) (1,3) are not.
TRUTH = np.array([0, 0, 1, 1])
SCORES = torch.tensor(
    [
        [1.0, 0.8, 0.4, 0.0],
        [0.8, 1.0, 0.2, 0.2],
        [0.4, 0.2, 1.0, 0.4],
        [0.0, 0.2, 0.4, 1.0],
    ]
)


def test_quality_by_hand() -> None:
    quality = pair_quality(SCORES, TRUTH)
    assert quality["precision"] == pytest.approx(1.2 / 2.0)
    assert quality["recall"] == quality["mean_same"] == pytest.approx(0.6)
    assert quality["mean_different"] == pytest.approx(0.2)
    # 0.8 beats all four other-class pairs, 0.4 beats three and ties with one: (4 + 3.5) / 8.
    assert quality["auc"] == pytest.approx(7.5 / 8)
    # Two true pairs: 0.8 is right, and of the two at 0.4 one of either kind has an equal chance.
    assert quality["precision_at_positives"] == pytest.approx(0.75)


def test_perfect_and_empty_pseudo_labels() -> None:
    same = torch.from_numpy(TRUTH[:, None] == TRUTH[None, :]).float()
    perfect = pair_quality(same, TRUTH)
    assert all(perfect[name] == 1 for name in ("precision", "recall", "auc", "precision_at_positives"))
    nothing = pair_quality(torch.eye(4), TRUTH)
    assert (nothing["precision"], nothing["recall"], nothing["auc"]) == (0, 0, 0.5)
    assert nothing["precision_at_positives"] == pytest.approx(2 / 6)  # what guessing gives


@pytest.mark.parametrize("truth", [[0, 0, 0, 0], [0, 1, 2, 3]])
def test_nothing_is_said_where_nothing_can_be(truth: list[int]) -> None:
    assert pair_quality(SCORES, np.array(truth)) == {}


def test_a_sample_is_the_seeds_own() -> None:
    assert sample_rows(4, seed=0, at_most=5).tolist() == [0, 1, 2, 3]
    rows = sample_rows(100, seed=0, at_most=5)
    assert len(set(rows.tolist())) == 5 and rows.tolist() == sorted(rows.tolist())
    assert rows.tolist() == sample_rows(100, seed=0, at_most=5).tolist()
    assert rows.tolist() != sample_rows(100, seed=1, at_most=5).tolist()


def make_objective(**labels: object) -> DualObjective:
    model = ModelConfig(dictionary_size=16, bank_size=16)
    return DualObjective(DIM, model=model, labels=PseudoLabelConfig(local_top_k=4, **labels), loss=LossConfig())  # type: ignore[arg-type]


def make_outputs() -> list[BranchOutput]:
    maps = torch.rand(2, IMAGES, DIM, 3, 3, generator=torch.Generator().manual_seed(0))
    logits = torch.zeros(IMAGES, 2)
    return [BranchOutput(parts, parts.mean(dim=(2, 3)), logits, logits) for parts in maps]


def in_batches(outputs: list[BranchOutput], size: int) -> list[list[BranchOutput]]:
    starts = range(0, IMAGES, size)
    return [[BranchOutput(*(tensor[start : start + size] for tensor in one)) for one in outputs] for start in starts]


def test_the_probe_judges_as_training_does_and_moves_nothing() -> None:
    objective, outputs = make_objective(), make_outputs()
    for judge, output in zip(objective.pseudo_labels, outputs, strict=True):
        judge.dictionary.push(output.parts.flatten(2).mean(2))
        judge.dictionary.describe(output.parts)  # training has seen parts, so their spread is known
    before = deepcopy(objective.state_dict())
    rows = np.array([1, 2, 7, 9])
    probe = PairProbe(objective, rows)
    for batch in in_batches(outputs, 4):
        probe(batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in objective.state_dict().items())
    objective.eval()
    for number, name in enumerate(("global", "local")):
        whole = objective.pseudo_labels[number](outputs[number], torch.zeros(0, dtype=torch.long))[0]
        torch.testing.assert_close(probe.scores()[name], whole[rows][:, rows])


def test_the_probe_asks_the_source_of_positive_labels() -> None:
    objective, outputs = make_objective(positives="global"), make_outputs()
    probe = PairProbe(objective, np.arange(IMAGES))
    probe(outputs)
    torch.testing.assert_close(probe.scores()["local"], ranking_scores(outputs[1].embedding, top_k=5))


def test_variants_of_scores() -> None:
    features = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    features[:, 0] = 5.0  # an entry that all images share, and that never varies
    rows = {(what, form): scores for what, form, scores in score_variants(features, features)}
    assert [sum(what.startswith(kind) for what, _ in rows) for kind in ("global", "cosine", "local")] == [12, 2, 2]
    assert all(scores.shape == (8, 8) and scores.isfinite().all() for scores in rows.values())
    torch.testing.assert_close(rows["global ranking, k=5", "raw"], ranking_scores(features, top_k=5))
    torch.testing.assert_close(
        rows["global ranking, k=5", "centred"], ranking_scores(features - features.mean(0), top_k=5)
    )
    assert rows["cosine", "centred"].mean() < rows["cosine", "raw"].mean()
