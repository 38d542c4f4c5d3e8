"""What a names.json makes of a bundle's labels, and which files are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ncd_serve.bundle import Bundle, BundleManifest
from ncd_serve.errors import DataError
from ncd_serve.naming import Names, Naming, apply_names, cluster_states, corrections_in_words, same_names
from ncd_serve.preprocess import PreprocessSpec

CHECKPOINT = "0123456789ab"


def manifest(
    clusters: int = 6, *, known: tuple[str, ...] = ("owl", "wren"), open_world: bool = False
) -> BundleManifest:
    """Of a bundle that nobody has named."""
    names = [f"cluster-{number}" for number in range(clusters)]
    facts = {"bundle_id": "b", "created": "", "dataset": "", "method": "dual", "training": {}, "versions": {}}
    return BundleManifest(
        **facts,
        checkpoint=CHECKPOINT,
        preprocess=PreprocessSpec(resolution=4, resize=4),
        known_classes=list(known),
        open_world=open_world,
        cluster_names=[*known, *names] if open_world else names,
        sha256={},
    )


def named(before: BundleManifest, clusters: dict[int, dict[str, Any]], **facts: Any) -> Naming:
    return apply_names(before, Names.model_validate({"clusters": clusters, **facts}))


def after(before: BundleManifest, clusters: dict[int, dict[str, Any]], **facts: Any) -> BundleManifest:
    return before.model_copy(update=named(before, clusters, **facts)._asdict())


def test_names_merges_and_junk() -> None:
    naming = named(manifest(), {1: {"name": " gull "}, 3: {"merge_into": 1}, 4: {"junk": True}}, checkpoint=CHECKPOINT)
    assert naming.cluster_names == ["cluster-0", "gull", "cluster-2", "gull", "junk", "cluster-5"]
    assert (naming.merged, naming.junk) == ({3: 1}, [4])


def test_chains_of_merges_end_at_the_last() -> None:
    naming = named(manifest(), {5: {"merge_into": 3}, 3: {"merge_into": 1}, 1: {"name": "gull"}})
    assert naming.merged == {3: 1, 5: 1}
    assert [naming.cluster_names[number] for number in (1, 3, 5)] == ["gull"] * 3


def test_an_entry_replaces_what_was_said_and_others_stay() -> None:
    first = after(manifest(), {0: {"name": "gull"}, 1: {"merge_into": 0}, 2: {"junk": True}, 3: {"name": "tern"}})
    second = after(first, {0: {"name": "crow"}, 2: {}, 3: {"junk": True}})
    assert second.cluster_names == ["crow", "crow", "cluster-2", "junk", "cluster-4", "cluster-5"]
    assert (second.merged, second.junk) == ({1: 0}, [3])
    assert after(second, {number: {} for number in range(6)}) == manifest()


def test_the_known_classes_of_an_open_world_keep_their_names() -> None:
    before = manifest(2, open_world=True)
    naming = named(before, {2: {"merge_into": 0}, 3: {"name": "gull"}, 0: {}, 1: {"name": "wren"}})
    assert naming == Naming(["owl", "wren", "owl", "gull"], {2: 0}, [], {}, {})
    assert after(after(before, {3: {"name": "gull"}}), {3: {}}).cluster_names[3] == "cluster-1"
    for entry in ({"name": "gull"}, {"merge_into": 2}, {"junk": True}):
        with pytest.raises(DataError, match="cluster 0 is the known class 'owl'"):
            named(before, {0: entry})


def test_equal_names_are_told_but_not_those_of_merged_clusters() -> None:
    naming = named(manifest(), {0: {"name": "gull"}, 1: {"name": "gull"}, 2: {"merge_into": 0}, 3: {"junk": True}})
    assert same_names(naming) == {"gull": [0, 1]}
    assert same_names(named(manifest(2, open_world=True), {2: {"name": "owl"}})) == {"owl": [0, 2]}


def test_what_became_of_every_cluster() -> None:
    states = cluster_states(after(manifest(1, open_world=True), {2: {"name": "gull"}}))
    assert [(cluster.cluster_name, cluster.state) for cluster in states] == [
        ("owl", "known"),
        ("wren", "known"),
        ("gull", "named"),
    ]
    states = cluster_states(after(manifest(3), {0: {"merge_into": 2}, 1: {"junk": True}}))
    assert states == [(0, "cluster-2", "merged", 2), (1, "junk", "junk", None), (2, "cluster-2", "unnamed", None)]


def test_exported_names_restore_what_was_there(tmp_path: Path) -> None:
    entries = {0: {"name": "Möwe: groß"}, 1: {"merge_into": 0}, 2: {"junk": True}, 6: {"name": "tern"}}
    wanted = after(manifest(), entries, images={"a.jpg": 6, "b.jpg": "wrong"})
    content = Names.of(Bundle(tmp_path, wanted)).as_json()
    assert (content["checkpoint"], content["bundle"]) == (CHECKPOINT, str(tmp_path))
    (tmp_path / "names.json").write_text(json.dumps(content))
    elsewhere = after(manifest(), {3: {"name": "crow"}, 0: {"junk": True}, 5: {"merge_into": 4}})
    assert Naming.of(wanted) == apply_names(elsewhere, Names.read(tmp_path / "names.json"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("names", "Invalid JSON"),
        ("[]", "must be a section"),
        ("{}", "clusters is missing"),
        ('{"clusters": {"gull": {}}}', "clusters.gull"),
        ('{"clusters": {}, "bundel": null}', "unknown key bundel"),
        ('{"clusters": {"1": {"nmae": "gull"}}}', r"unknown key clusters\.1\.nmae"),
        ('{"clusters": {"1": "gull"}}', r"clusters\.1 must be a section"),
        ('{"clusters": {"1": {"name": 5}}}', r"clusters\.1\.name must be text"),
        ('{"clusters": {"1": {"name": " "}}}', r"clusters\.1\.name: a name cannot be empty"),
        ('{"clusters": {"1": {"name": "a\\nb"}}}', "cannot hold line breaks"),
        ('{"clusters": {"1": {"name": "a\\u2028b"}}}', "cannot hold line breaks"),
        ('{"clusters": {"1": {"name": "a\\u0007b"}}}', "cannot hold line breaks or control characters"),
        (json.dumps({"clusters": {"1": {"name": "x" * 201}}}), "at most 200 characters, not 201"),
        ('{"clusters": {"1": {"merge_into": true}}}', r"clusters\.1\.merge_into must be a whole number"),
        (
            '{"clusters": {"1": {"merge_into": 2, "junk": true}}}',
            r"clusters\.1: merge_into and junk exclude each other",
        ),
    ],
)
def test_files_that_are_no_names(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text(text)
    with pytest.raises(DataError, match=reason) as refusal:
        Names.read(path)
    assert str(path) in str(refusal.value) and refusal.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        Names.read(tmp_path / "names.json")


@pytest.mark.parametrize(
    ("clusters", "reason"),
    [
        ({6: {"name": "gull"}}, "cluster 6 is not in the model"),
        ({-1: {}}, "cluster -1 is not in the model"),
        ({1: {"merge_into": 6}}, "cluster 1 is merged into 6, which is not in the model"),
        ({1: {"merge_into": 1}}, "circle: 1 into 1"),
        ({1: {"merge_into": 2}, 2: {"merge_into": 3}, 3: {"merge_into": 1}}, "circle: 1 into 2 into 3 into 1"),
        ({1: {"merge_into": 2}, 2: {"junk": True}}, "cluster 1 is merged into 2, which is junk"),
    ],
)
def test_names_that_do_not_suit_the_model(clusters: dict[int, dict[str, Any]], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        named(manifest(), clusters)


def test_what_was_said_before_counts_too() -> None:
    before = after(manifest(), {1: {"merge_into": 2}, 4: {"junk": True}})
    with pytest.raises(DataError, match="circle"):
        named(before, {2: {"merge_into": 1}})
    with pytest.raises(DataError, match="cluster 1 is merged into 2, which is junk"):
        named(before, {2: {"junk": True}})
    with pytest.raises(DataError, match="cluster 0 is merged into 4, which is junk"):
        named(before, {0: {"merge_into": 4}})


def test_names_of_another_model() -> None:
    with pytest.raises(DataError, match=f"of model ba9876543210, the bundle is of model {CHECKPOINT}"):
        named(manifest(), {}, checkpoint="ba9876543210")
    older = manifest().model_copy(update={"checkpoint": ""})
    with pytest.raises(DataError, match="an older version made it"):
        named(older, {}, checkpoint=CHECKPOINT)
    assert named(older, {0: {"name": "gull"}}, checkpoint=None).cluster_names[0] == "gull"


def test_single_images_are_moved_marked_as_wrong_or_given_a_new_cluster() -> None:
    entries = {0: {"name": "gull"}, 6: {"name": "tern"}}
    said = after(manifest(), entries, images={"a.jpg": 0, "b.jpg": "wrong", "c.jpg": 6, "d.jpg": 7})
    assert said.images == {"a.jpg": 0, "b.jpg": "wrong", "c.jpg": 6, "d.jpg": 7}
    assert said.new_names == {6: "tern", 7: "cluster-7"} and len(said.cluster_names) == 6
    assert corrections_in_words(said) == "1 moved, 2 in 2 new categories, 1 in none"
    again = after(said, {7: {"name": "auk"}}, images={"a.jpg": None, "b.jpg": 1, "c.jpg": None})
    assert again.images == {"b.jpg": 1, "d.jpg": 7} and again.new_names == {7: "auk"}
    assert again.cluster_names[0] == "gull" and corrections_in_words(manifest()) == ""


@pytest.mark.parametrize(
    ("clusters", "images", "message"),
    [
        ({6: {"name": "tern"}}, {}, "cluster 6 is not in the model"),
        ({6: {"junk": True}}, {"a.jpg": 6}, "cluster 6 is not in the model yet"),
        ({}, {"a.jpg": -1}, "an image is given to cluster -1"),
        ({}, {"a.jpg": 10**6}, "an image is given to cluster 1000000"),
    ],
)
def test_corrections_that_cannot_be(clusters: dict[int, Any], images: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        named(manifest(), clusters, images=images)
