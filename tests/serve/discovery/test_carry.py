"""Names that go over to a model that was trained apart, by the images of training or by asking about a folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.discovery.carry import Match, carry_names
from ncd_serve.errors import DataError
from ncd_serve.files import sha256
from ncd_serve.naming import Names, apply_names
from ncd_serve.reference import REFERENCE
from tests.serve.patterns import CLUSTERS, EACH, make_bundle

ORDER = np.array([1, 2, 0])  # what the other model calls clusters 0, 1 and 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same images: the second has the clusters of the first in another order, the last one split."""
    folder = tmp_path_factory.mktemp("patterns")
    names = ["auk", "tern", "cluster-2"]
    first, second = make_bundle(folder / "first", cluster_names=names), make_bundle(folder / "second")
    ids = ORDER[Bundle.read(second).reference().cluster_ids]
    ids[-EACH // 2 - 2 :] = 1  # of cluster 2, more than half goes to the one that auk is
    give(second, ids)
    return first, second


def give(bundle: Path, ids: np.ndarray) -> None:
    """Make it a bundle of another model, which puts the images of training into these clusters."""
    opened = Bundle.read(bundle)
    counts = np.bincount(ids, minlength=CLUSTERS)
    replace(opened.reference(), cluster_ids=ids, counts=counts).write(bundle / REFERENCE)
    hashes = {**opened.manifest.sha256, REFERENCE: sha256(bundle / REFERENCE)}
    said(bundle, checkpoint="f" * 12, sha256=hashes)


def said(bundle: Path, **facts: Any) -> None:
    content = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps({**content, **facts}))


def test_by_the_images_of_training(pair: tuple[Path, Path]) -> None:
    first, second = pair
    paths = Bundle.read(first).reference().paths
    own = {CLUSTERS: "owl"}
    said(
        first, images={paths[0]: 1, paths[1]: "wrong", paths[2]: CLUSTERS, paths[-1]: 2}, new_names=own, merged={"2": 0}
    )
    names, matches = carry_names(first, second)
    auk, tern = matches  # auk won cluster 2, which is in both parts, and lost three images, one of them to tern
    assert auk == Match(0, "auk", [1, 0], pytest.approx(57 / 58), 57) and auk.carried
    assert tern == Match(1, "tern", [2], pytest.approx(30 / 31), 31) and tern.carried
    applied = apply_names(Bundle.read(second).manifest, names)
    assert applied.cluster_names == ["auk", "auk", "tern"] and applied.merged == {0: 1}
    assert applied.images == {paths[0]: 2, paths[1]: "wrong", paths[2]: CLUSTERS, paths[-1]: 1}
    assert applied.new_names == own
    said(first, images={}, new_names={}, merged={})


def test_what_was_merged_is_one_cluster_of_the_other_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each of the parts has half of it."""
    first, other = shutil.copytree(pair[0], tmp_path / "first"), shutil.copytree(pair[1], tmp_path / "other")
    said(first, merged={"1": 0})
    give(other, np.repeat([0, 0, 1], EACH))
    names, (auk,) = carry_names(first, other)
    assert auk == Match(0, "auk", [0], 1.0, 2 * EACH)
    assert {number: entry.name for number, entry in names.clusters.items()} == {0: "auk"}
    said(other, merged={"0": 1})
    names, (unnamed,) = carry_names(other, first)
    assert unnamed.name == "cluster-1" and unnamed.carried
    applied = apply_names(Bundle.read(first).manifest, names)
    assert applied.merged == {1: 0, 2: 0} and applied.cluster_names[0] == "auk", "a merge without a name goes over, too"


def test_what_no_cluster_is(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """It keeps its name to itself, and no image is given to it."""
    first = shutil.copytree(pair[0], tmp_path / "first")
    path = Bundle.read(first).reference().paths[-1]
    said(first, cluster_names=["cluster-0", "cluster-1", "gull"], images={path: 2})
    names, (gull,) = carry_names(first, pair[1])
    assert not gull.carried, "17 of its 30 images are in another cluster"
    assert names.clusters == {} and names.images == {}


def test_a_bundle_without_names(pair: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="second has no names") as caught:
        carry_names(*reversed(pair))
    assert "comes first" in str(caught.value.hint)


def test_and_back(pair: tuple[Path, Path]) -> None:
    first, second = pair
    said(second, cluster_names=["cluster-0", "razorbill", "cluster-2"], junk=[2])
    names, matches = carry_names(second, first)
    assert [(match.old, match.new, match.carried) for match in matches] == [(1, [0], True), (2, [1], True)]
    assert Names.of(Bundle.read(first)).clusters[0].name == "auk"
    applied = apply_names(Bundle.read(first).manifest, names)
    assert applied.cluster_names == ["razorbill", "junk", "cluster-2"]
    said(second, cluster_names=[f"cluster-{number}" for number in range(CLUSTERS)], junk=[])


def test_by_asking_about_a_folder(pair: tuple[Path, Path]) -> None:
    """The answers count there, and the models are the same but for their names."""
    first, second = pair
    names, matches = carry_names(first, second, images=first.parent / "pile")
    assert {number: entry.name for number, entry in names.clusters.items()} == {0: "auk", 1: "tern"}
    assert [(match.new, match.overlap) for match in matches] == [([0], 1.0), ([1], 1.0)]
