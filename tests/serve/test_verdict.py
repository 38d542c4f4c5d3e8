"""A verdict in words, and in the summary of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncd_serve.verdict import Verdict, read_verdict

GOOD = Verdict(images=400, clusters=20, expected=0.72, silhouette=0.08, agreement=0.7, tight=list(range(18)))


def test_words_come_in_the_order_of_their_weight() -> None:
    verdict = GOOD.model_copy(update={"alike": [(4, 9)], "empty": [3], "nowhere": 31})
    assert verdict.sentences() == [
        "expect about 7 of 10 images in the right cluster",
        "18 of 20 clusters are tight",
        "cluster 4 and cluster 9 look like one",
        "1 cluster has no images",
        "31 images fit nowhere",
    ]


def test_a_number_of_clusters_that_is_far_from_that_of_the_classes_is_said_early() -> None:
    many = GOOD.model_copy(update={"classes": 11})
    assert many.sentences()[1] == "the images look like about 11 classes, not 20"
    assert len(GOOD.model_copy(update={"classes": 17}).sentences()) == len(many.sentences()) - 1


def test_names_replace_numbers_and_long_lists_are_counted() -> None:
    verdict = GOOD.model_copy(update={"tight": [0], "alike": [(number, 9) for number in range(5)], "nowhere": 1})
    assert verdict.sentences("bird-{}".format)[1:] == [
        "1 of 20 clusters is tight",
        "bird-0 and bird-9; bird-1 and bird-9; bird-2 and bird-9 and 2 more pairs look like one each",
        "1 image fits nowhere",
    ]


def test_a_verdict_is_read_from_the_summary_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"scores": {}, "verdict": GOOD.model_dump()}))
    assert read_verdict(tmp_path) == GOOD


@pytest.mark.parametrize("content", [None, "{}", "[]", "{", '{"verdict": null}', '{"verdict": {"images": 3}}'])
def test_runs_without_one_have_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    assert read_verdict(tmp_path) is None
