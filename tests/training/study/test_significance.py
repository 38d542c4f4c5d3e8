"""Paired bootstrap: real differences are found, chance is not taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from ncd_training.study.significance import Graded, Interval, resample


def run_of(right: object, seed: int = 0) -> Graded:
    flags = np.asarray(right, dtype=bool)
    return Graded(tuple(f"{seed}-{number}" for number in range(len(flags))), flags)


def test_a_pair_by_hand() -> None:
    # 100 images: both right on 40, only the first on 30, only the second on 10.
    first, second = np.zeros(100), np.zeros(100)
    first[:70], second[:40], second[70:80] = 1, 1, 1
    found = resample({"a": [run_of(first)], "b": [run_of(second)]})
    assert found is not None and found.best == "a"
    gap = found.difference("a", "b")
    # The variance of one image's difference is 0.4 - 0.2^2 = 0.36, so the deviation of the mean is 6 points.
    assert gap.mean == pytest.approx(20.0)
    assert (gap.low, gap.high) == (pytest.approx(20 - 11.8, abs=2), pytest.approx(20 + 11.8, abs=2))
    assert gap.real
    assert found.difference("b", "a").mean == pytest.approx(-20.0)
    score = found.score("a")
    assert score.mean == pytest.approx(70.0) and score.low == pytest.approx(70 - 9, abs=2)


def test_pairing_finds_what_intervals_of_each_row_hide() -> None:
    rng = np.random.default_rng(0)
    second = rng.random(400) < 0.5
    first = second.copy()
    first[np.flatnonzero(~second)[:12]] = True  # always at least as good
    found = resample({"a": [run_of(first)], "b": [run_of(second)]})
    assert found is not None
    assert found.score("a").low < found.score("b").high
    assert found.difference("a", "b").real


def test_seeds_that_disagree_are_no_real_difference() -> None:
    better, worse = np.arange(200) < 140, np.arange(200) < 100
    runs = {"a": [run_of(better), run_of(worse)], "b": [run_of(worse), run_of(better)]}
    found = resample(runs)
    assert found is not None
    assert not found.difference("a", "b").real
    # Piles of their own for every seed.
    apart = resample(
        {label: [run._replace(images=(f"{n}",) * 200) for n, run in enumerate(rows)] for label, rows in runs.items()}
    )
    assert apart is not None and not apart.difference("a", "b").real


def test_what_cannot_be_paired_is_not_tested() -> None:
    run = run_of([True, False])
    assert resample({"a": [run], "b": [None]}) is None
    assert resample({"a": [run]}) is None
    assert resample({"a": [run], "b": [run_of([True, False], seed=1)]}) is None
    assert not Interval(1.0, -0.5, 2.0).real
