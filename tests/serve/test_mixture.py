from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ncd_serve.mixture import Mixture, fit_mixture, grow, log_student, relabel


def by_hand(**changed: float) -> Mixture:
    """Known class at 1, cluster at -1, on a line."""
    numbers = {"tail": 1.0, "spread": 1.0, "unseen_spread": 4.0, "slope": 1.0, "intercept": 0.0, **changed}
    arrays = (np.array([[1.0], [0.0]]), np.zeros(1), np.array([[1.0], [-1.0]]), np.ones(2))
    return Mixture(*arrays, known_classes=1, first_cluster=1, **numbers)


def test_the_density_of_a_student_t() -> None:
    """With one degree of freedom and one dimension it falls with 1 + r^2 / spread."""
    mixture = by_hand()
    assert log_student(np.array([0.0, 4.0]), 1.0, mixture).tolist() == pytest.approx([0.0, -math.log(5)])
    assert log_student(np.array([4.0]), 4.0, mixture)[0] == pytest.approx(-math.log(2) - math.log(2))


def test_the_probability_of_being_in_no_cluster() -> None:
    """At 1: the known class has density 1, unseen ones 1 / (2 * 1.25), the cluster 1 / 5. So 1.4 to 0.2: odds of 7."""
    image = np.array([[3.0, 0.0]])  # its direction counts, not its length
    assert by_hand().outside(image)[0] == pytest.approx(7 / 8)
    assert by_hand(slope=2.0, intercept=-math.log(7)).outside(image)[0] == pytest.approx(7 / 8)
    assert by_hand().outside(-image)[0] == pytest.approx((0.2 + 0.4) / (0.2 + 0.4 + 1))


def test_the_probability_of_a_known_class() -> None:
    """At 1: the known class has density 1, the cluster 0.2, unseen ones 0.4; so 1 to 0.6."""
    image = np.array([[3.0, 0.0]])
    assert by_hand().known(image)[0] == pytest.approx(1 / 1.6)
    assert by_hand(known_slope=2.0, known_intercept=math.log(0.36)).known(image)[0] == pytest.approx(1 / (1 + 0.36**2))
    assert by_hand().known(-image)[0] == pytest.approx(0.2 / (0.2 + 0.4 + 1))


def images_of(classes: int, *, each: int = 40, dims: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(classes), each)
    means = np.random.default_rng(5).normal(0, 3, (classes, dims)) + 10
    return means[ids] + rng.normal(0, 0.5, (len(ids), dims)), ids


def test_left_out_classes_are_outside_and_new_images_of_clusters_are_not() -> None:
    embeddings, ids = images_of(10)
    seen = ids < 8
    mixture = fit_mixture(embeddings[seen], ids[seen], number=8, known=5)
    fresh, classes = images_of(10, seed=1)
    outside = mixture.outside(fresh)
    assert outside[(classes >= 5) & (classes < 8)].max() < 0.1
    assert outside[classes < 5].min() > 0.9, "known classes are no clusters"
    assert outside[classes >= 8].min() > 0.8
    known = mixture.known(fresh)
    assert known[classes < 5].min() > 0.5 and known[classes >= 5].max() < 0.1


def test_in_an_open_world_known_classes_are_inside_and_known() -> None:
    embeddings, ids = images_of(10)
    seen = ids < 8
    fresh, classes = images_of(10, seed=1)
    rare, common = (
        fit_mixture(embeddings[seen], ids[seen], number=8, known=5, open_world_share=share) for share in (0.1, 0.6)
    )
    assert common.outside(fresh)[classes < 8].max() < 0.1 and common.outside(fresh)[classes >= 8].min() > 0.8
    assert common.known(fresh)[classes < 5].min() > 0.9 and common.known(fresh)[classes >= 5].max() < 0.1
    assert common.known(fresh).mean() > rare.known(fresh).mean(), "what is expected counts"


def test_the_space_makes_all_classes_vary_alike() -> None:
    embeddings, ids = images_of(6, each=400)
    embeddings[:, 0] += 20 * np.random.default_rng(2).normal(size=len(ids))  # says nothing about the class
    mixture = fit_mixture(embeddings, ids, number=6, known=0)
    rest = (mixture.project(embeddings) - mixture.means[ids]).var(0)
    raw = (embeddings - np.stack([embeddings[ids == number].mean(0) for number in range(6)])[ids]).var(0)
    assert rest.max() / rest.min() < 0.02 * raw.max() / raw.min()
    assert (mixture.log_joint(mixture.project(embeddings)).argmax(1) == ids).mean() > 0.95


def test_a_cluster_without_images_is_never_likely() -> None:
    embeddings, ids = images_of(3)
    mixture = fit_mixture(embeddings, ids, number=5, known=1)
    assert set(mixture.log_joint(mixture.project(embeddings)).argmax(1)) == {0, 1, 2}
    assert np.isfinite(mixture.outside(embeddings)).all()


def test_one_cluster_alone_can_be_calibrated() -> None:
    embeddings, ids = images_of(3)
    mixture = fit_mixture(embeddings, ids, number=3, known=2)
    assert np.isfinite([mixture.slope, mixture.intercept]).all()
    assert mixture.outside(embeddings)[ids == 2].mean() < mixture.outside(embeddings)[ids < 2].mean()


def test_moved_images_move_the_means() -> None:
    """Two images at 1 and 3 of the class at 2, two of the class at -1: the image at 3 goes over, then to none."""
    mixture = replace(by_hand(), means=np.array([[2.0], [-1.0]]), weights=np.array([2.0, 1.0]))
    place, sizes = np.array([[3.0]]), np.array([2, 2])
    over = relabel(mixture, place, np.array([0]), np.array([1]), sizes=sizes)
    assert over.means.ravel().tolist() == pytest.approx([1.0, 1 / 3]) and over.weights.tolist() == [1.0, 1.5]
    gone = relabel(mixture, place, np.array([0]), np.array([-1]), sizes=sizes)
    assert gone.means.ravel().tolist() == pytest.approx([1.0, -1.0]) and gone.weights.tolist() == [1.0, 1.0]


def test_a_new_class_takes_one_in_a_hundred_images_of_old_ones_at_most() -> None:
    rng = np.random.default_rng(0)
    means = rng.normal(0, 2, (21, 8))
    ids = np.repeat(np.arange(20), 50)
    places = means[ids] + rng.normal(0, 1, (len(ids), 8))
    mixture = fit_mixture(places + 20, ids, number=20, known=0)
    training = mixture.project(places + 20)
    group = mixture.project(means[20:] + rng.normal(0, 1, (30, 8)) + 20)
    grown = grow(mixture, [group], np.zeros((0, mixture.dims)), (training, ids))
    fresh = mixture.project(means[ids] + rng.normal(0, 1, (len(ids), 8)) + 20)
    assert (grown.log_joint(fresh).argmax(1) == 20).mean() <= 0.01
    assert (grown.log_joint(group).argmax(1) == 20).mean() > 0.5
    assert grown.weights[:20].tolist() == mixture.weights.tolist()


def test_images_of_the_new_class_that_were_not_found_do_not_raise_the_lead_that_it_needs() -> None:
    embeddings, ids = images_of(3)
    mixture = fit_mixture(embeddings, ids, number=3, known=0)
    training = mixture.project(embeddings), ids
    far = -2 * mixture.project(embeddings[ids == 0])  # opposite to a class, and beyond all of them
    assert (mixture.outside_at(far) > 0.5).all()
    alone, beside = (grow(mixture, [far[:10]], others, training) for others in (far[:0], far[10:]))
    assert beside.weights.tolist() == alone.weights.tolist()
