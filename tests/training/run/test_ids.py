"""Clusters of a retrained model get the ids of those that they are, by images of both, worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from ncd_training.base.run_dir import RunDir
from ncd_training.config.schema import DataConfig, TrainConfig
from ncd_training.data.carried import NONE, Carried
from ncd_training.data.prepare import finish_placing
from ncd_training.objective.self_labels import as_said
from ncd_training.run.ids import Matching, _place_columns, changes_of, match_clusters

from ncd_serve.bundle import Ancestor
from ncd_serve.naming import Names

PARENT = Ancestor(generation=1, bundle_id="b", digest="", folder="bundle", created="now", clusters=4)


def carried(columns: list[int], **facts: Any) -> Carried:
    """Clusters 0, 1 and 3 of four (2 was merged away), and one that is new, in columns 0 to 3."""
    given: dict[str, Any] = {
        "bundle": Path("bundle"),
        "ancestors": [PARENT],
        "clusters": 4,
        "first": 0,
        "ids": [0, 1, 3, 4],
        "names": Names(clusters={}),
        "columns": columns,
        "said": [False] * len(columns),
        "wrong": [NONE] * len(columns),
        "added": [column in (NONE, 3) for column in columns],
        **facts,
    }
    return Carried(**given)


def test_clusters_that_are_the_same_keep_their_ids() -> None:
    """0 and the candidate 4 only changed columns, half of 1 is in one column and half in another, 3 joined 0."""
    before = carried([0] * 6 + [1] * 4 + [2] * 2 + [3] * 3 + [NONE])
    now = np.array([2] * 6 + [0, 0, 1, 1] + [2] * 2 + [3] * 3 + [2])
    matching = match_clusters(before, now)
    assert matching.ids == [1, 5, 0, 4], "column 0 has half of cluster 1, and no other image; column 1 gets a new id"
    assert matching.total == 6 and matching.overlaps[0, 2] == 6 / 8 and matching.overlaps[2, 2] == 2 / 8
    found = {change.cluster_id: change for change in changes_of(before, now, matching)}
    assert [found[number].kind for number in range(6)] == ["grown", "kept", "kept", "merged", "new", "new"]
    assert (found[0].images, found[0].added, found[0].moved, found[0].overlap) == (6, 1, 0, 0.75)
    assert (found[1].moved, found[1].overlap) == (2, 0.5)
    assert (found[2].images, found[2].overlap) == (0, None)
    assert (found[3].images, found[3].moved, found[3].overlap, found[3].like) == (2, 2, 0.25, 0)
    assert (found[4].added, found[5].moved) == (3, 2)


def test_below_half_an_id_is_not_used_again() -> None:
    """Cluster 1 falls into three parts; column 3 has no image and no id."""
    before = carried([0] * 3 + [1] * 6 + [2] * 3)
    now = np.array([0, 0, 0] + [1, 1, 2, 2, 0, 0] + [2] * 3)
    matching = match_clusters(before, now)
    assert matching.ids == [0, 5, 3, NONE]
    (split,) = (change for change in changes_of(before, now, matching) if change.cluster_id == 1)
    assert (split.kind, split.like, split.overlap) == ("split", 5, 2 / 6)


def test_a_category_that_did_not_become_a_cluster() -> None:
    """Most images of the candidate 4 are in cluster 0; its column has images of 1, which is in two columns."""
    before = carried([0] * 6 + [1] * 4 + [2] * 2 + [3] * 3)
    now = np.array([0] * 6 + [1, 1, 3, 3] + [2] * 2 + [0, 0, 1])
    matching = match_clusters(before, now)
    found = {change.cluster_id: change for change in changes_of(before, now, matching)}
    assert (found[4].kind, found[4].images, found[4].moved, found[4].like) == ("merged", 3, 3, 0)
    assert found[4].overlap == 2 / 9


def test_known_classes_stay_where_they_are() -> None:
    before = carried([2] * 4 + [3] * 4 + [0], first=2, ids=[2, 3], clusters=4)
    matching = match_clusters(before, np.array([3] * 4 + [2] * 4 + [1]))
    assert (matching.ids, matching.total) == ([3, 2], 4)
    gone = np.array([0] * 3 + [2] + [3] * 4 + [1])  # of cluster 2, one image in four has not gone to a known class
    matching = match_clusters(before, gone)
    assert (matching.ids, matching.total, matching.overlaps[0, 0]) == ([4, 3], 5, 0.25)
    assert [change.kind for change in changes_of(before, gone, matching)] == ["merged", "grown", "new"]


def test_columns_are_put_where_their_ids_are() -> None:
    old, bias = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 3.0])
    new, biases = torch.ones(5, 1), torch.ones(5)
    matching = Matching([2, 0], np.zeros((2, 2)), 4)  # one known class comes first, in a joint head
    _place_columns(old, new, matching, first=0)
    _place_columns(bias, biases, matching, first=0)
    assert new.flatten().tolist() == [1, 3, 0, 2, 0] and biases.tolist() == [1, 3, -1e4, 2, -1e4]


def test_targets_are_what_a_person_said() -> None:
    """Clusters 0 and 1 were found in the other columns; an image is in 1 by a person, another one is not in 0."""
    targets = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.4, 0.6], [0.9, 0.1], [0.7, 0.3]])
    before = carried(
        [0, 0, 1, 1, NONE], ids=[0, 1], said=[False, False, True, False, False], wrong=[0, NONE, NONE] + [NONE] * 2
    )
    found = as_said(targets, before, aligned=False)
    expected = [[0, 1], [0.8, 0.2], [0, 1], [0.1, 0.9], [0.3, 0.7]]
    assert torch.allclose(found, torch.tensor(expected)) and torch.equal(targets[0], torch.tensor([0.1, 0.9]))
    again = as_said(found, before)
    assert torch.equal(found, again) and as_said(targets, None) is targets


def test_a_process_that_was_killed_while_ids_were_written(tmp_path: Path) -> None:
    """Before the ids were decided, the old checkpoint counts; afterwards, the new one and its number of clusters."""
    config = TrainConfig()
    run = RunDir.create(tmp_path / "run", config.model_copy(update={"data": DataConfig(novel_classes=4)}))
    run.checkpoint.parent.mkdir()
    run.checkpoint.write_text("old")
    run.placed.write_text("half")
    finish_placing(run, carried([0]))
    assert run.checkpoint.read_text() == "old" and not run.placed.exists() and run.config().data.novel_classes == 4
    run.placed.write_text("new")
    changes = [{"cluster_id": 0, "kind": "kept", "images": 1, "added": 0, "moved": 0}]
    decided = carried([0], ids=[0, 1, 2, 3, 4, 5], changes=changes)
    for _ in range(2):
        finish_placing(run, decided)
        assert run.checkpoint.read_text() == "new" and not run.placed.exists()
        assert run.config().data.novel_classes == 6
