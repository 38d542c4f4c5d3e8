from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ncd_serve.discovery.groups import Group, find_groups, join_groups
from ncd_serve.mixture import Mixture, fit_mixture
from tests.serve.test_mixture import images_of


def model(classes: int = 8) -> tuple[Mixture, np.ndarray, np.ndarray]:
    embeddings, ids = images_of(classes)
    mixture = fit_mixture(embeddings, ids, number=classes, known=5)
    return mixture, mixture.project(embeddings), ids


def test_a_class_that_training_did_not_have_is_one_group() -> None:
    mixture, training, ids = model()
    fresh, classes = images_of(9, seed=3)
    batch = mixture.project(fresh)
    groups = join_groups(find_groups(mixture, batch, training, min_strength=0.5), batch, training, ids)
    (found,) = [group for group in groups if group.strength > 0.95]
    assert set(classes[found.rows]) == {8} and len(found.rows) > 30
    assert found.purity > 0.9 and found.evidence > 5


@pytest.mark.parametrize("seed", range(5))
def test_other_images_of_the_same_classes_are_no_group(seed: int) -> None:
    mixture, training, _ = model()
    fresh, _ = images_of(8, seed=10 + seed)
    assert find_groups(mixture, mixture.project(fresh), training, min_strength=0.95) == []


def test_other_shares_of_the_same_classes_are_no_group() -> None:
    mixture, training, _ = model()
    fresh, classes = images_of(8, each=200, seed=4)
    assert find_groups(mixture, mixture.project(fresh[classes == 6]), training, min_strength=0.95) == []


def test_too_few_images_are_no_group() -> None:
    mixture, training, _ = model()
    assert find_groups(mixture, training[:7], training) == []


def test_strength_and_purity_by_hand() -> None:
    """24 images where training makes 2 likely: 12 times as many; 4 times the limit of 3."""
    group = Group(np.arange(24), np.zeros(1), 1.0, claimed=3, expected=2.0, nearest=0)
    deviations = math.log(4) / math.sqrt(1 / 24 + 1 / 3.5)
    assert group.strength == pytest.approx(0.5 * (1 + math.erf(deviations / math.sqrt(2))))
    assert group.purity == pytest.approx(1 - 2 / 24)
    assert replace(group, expected=8.0).strength == pytest.approx(0.5), "at the limit"
    assert replace(group, expected=30.0).purity == 0.0


def test_halves_of_a_class_are_joined_and_classes_are_not() -> None:
    mixture, training, ids = model()
    fresh, classes = images_of(10, seed=5)
    batch = mixture.project(fresh)
    rows = [np.flatnonzero(classes == 8)[:20], np.flatnonzero(classes == 8)[20:], np.flatnonzero(classes == 9)]
    parts = [Group(each, batch[each].mean(0), 1.0, 0, 1.0, 0) for each in rows]
    joined = join_groups(parts, batch, training, ids)
    assert sorted(len(group.rows) for group in joined) == [40, 40]
    assert {group.expected for group in joined} == {1.0, 2.0}
