from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.discovery.carry import carry_names, overlap
from ncd_serve.discovery.find import Candidates, discover, read_batch
from ncd_serve.discovery.history import generations
from ncd_serve.errors import DataError, UsageError
from ncd_serve.gallery.clusters import describe_clusters
from ncd_serve.gallery.read import read_source
from ncd_serve.rows.assignment import assign_images
from ncd_serve.rows.tables import read_rows, write_csv
from ncd_serve.runners import OnnxRunner
from tests.serve.patterns import EACH, KNOWN, make_bundle, save


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("patterns") / "bundle", cluster_names=["auk", "tern", "cluster-2"])


def batch(folder: Path, *kinds: int, each: int = 25) -> Path:
    for kind in kinds:
        save(folder, kind, each, seed=1)
    return folder


def rows_of(images: Path, bundle: Path, target: Path) -> Path:
    with target.open("w", newline="") as stream:
        write_csv(assign_images(sorted(images.iterdir()), OnnxRunner(bundle)), stream)
    return target


def test_a_new_class_is_proposed_with_its_images(bundle: Path, tmp_path: Path) -> None:
    found = discover(batch(tmp_path / "new", 0, KNOWN, KNOWN + 1, 20), bundle)
    (candidate,) = found.candidates.candidates
    assert all(Path(path).name.startswith("20-") for path in candidate.images) and len(candidate.images) == 25
    assert candidate.strength > 0.95 and candidate.purity > 0.9
    assert found.known == {"known-0": 25} and (found.images, found.unreadable) == (100, 0)
    assert 20 <= found.outside <= 30, "those of the known class are in no cluster either"


def test_rows_are_as_good_as_a_folder(bundle: Path, tmp_path: Path) -> None:
    images = batch(tmp_path / "new", KNOWN, 20)
    rows = rows_of(images, bundle, tmp_path / "rows.csv")
    assert discover(rows, bundle) == discover(images, bundle)
    outside = {row.path: row.outside or 0.0 for row in read_rows(rows)}
    assert all((value > 0.5) == Path(path).name.startswith("20-") for path, value in outside.items())


def test_nothing_is_proposed_where_nothing_is_new(bundle: Path, tmp_path: Path) -> None:
    found = discover(batch(tmp_path / "new", *range(KNOWN + 3)), bundle)
    assert found.candidates.candidates == []


def test_copies_of_old_images_and_of_one_image_are_not_new(bundle: Path, tmp_path: Path) -> None:
    assert discover(bundle.parent / "pile", bundle).candidates.candidates == []
    (one,) = save(tmp_path / "new", 20, 1)
    for number in range(30):
        one.with_name(f"copy-{number}.png").write_bytes(one.read_bytes())
    with pytest.raises(DataError, match="1 readable images are too few"):
        discover(tmp_path / "new", bundle)


def test_batches_that_cannot_be_looked_at(bundle: Path, tmp_path: Path) -> None:
    save(tmp_path / "one", 20, 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no image")
    for folder, reason in (("one", "too few"), ("empty", "no images"), ("bad", "none of the 1"), ("none", "no such")):
        with pytest.raises(DataError, match=reason):
            discover(tmp_path / folder, bundle)


def test_unreadable_images_are_counted(bundle: Path, tmp_path: Path) -> None:
    images = batch(tmp_path / "new", KNOWN, 20)
    (images / "broken.png").write_bytes(b"no image")
    assert discover(images, bundle).unreadable == 1
    assert len(read_batch(images, Bundle.read(bundle)).paths) == 50


def test_candidates_are_checked(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "candidates.json"
    entry = {"checkpoint": "0123456789ab", "generation": 1, "candidates": [{"images": ["a", "b"], "name": " "}]}
    for content, reason in (
        ("{", "Invalid JSON"),
        ("{}", "checkpoint"),
        (json.dumps(entry), "candidates.0.name"),
        (json.dumps({**entry, "candidates": [{"images": ["a"]}]}), "candidates.0.images"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=reason):
            Candidates.read(file)


def test_overlap_by_hand() -> None:
    """Old 0 and new 1 share two of three images; old 1 and new 0 one of two."""
    found = overlap(np.array([0, 0, 0, 1]), np.array([1, 1, 0, 0]), before=2, after=2)
    assert found.tolist() == [[0.25, 2 / 3], [0.5, 0.0]]


def test_names_go_to_the_clusters_with_the_same_images(bundle: Path, tmp_path: Path) -> None:
    other = make_bundle(tmp_path / "other" / "bundle", cluster_names=["cluster-0", "cluster-1", "cluster-2"])
    manifest = json.loads((other / "bundle.json").read_text())
    with pytest.raises(UsageError, match="of the same model"):
        carry_names(bundle, other)
    (other / "bundle.json").write_text(json.dumps({**manifest, "checkpoint": "f" * 12}))
    with pytest.raises(DataError, match="trained on 0 images in common"):
        carry_names(bundle, other)
    names, matches = carry_names(bundle, other, images=batch(tmp_path / "both", KNOWN, KNOWN + 1, KNOWN + 2))
    assert {number: entry.name for number, entry in names.clusters.items()} == {0: "auk", 1: "tern"}
    assert [(match.old, match.new, match.overlap, match.images) for match in matches] == [
        (0, [0], 1, 25),
        (1, [1], 1, 25),
    ]
    assert names.checkpoint == "f" * 12 and names.bundle == other


def test_a_first_generation_has_no_ancestors(bundle: Path) -> None:
    (only,) = generations(bundle)
    assert (only.generation, only.clusters, only.changes) == (1, 3, f"found in {3 * EACH} images")


def test_centres_of_a_batch_are_those_of_training(bundle: Path, tmp_path: Path) -> None:
    images = batch(tmp_path / "new", KNOWN, each=8)
    batch(images, 20, each=40)  # as many intruders would make a centre of their own
    rows = rows_of(images, bundle, tmp_path / "rows.csv")
    shown = read_source(rows, bundle=bundle)
    clusters, central = describe_clusters(shown)
    real = np.array([path.startswith(f"{KNOWN}-") for path in shown.paths])
    home = shown.cluster_ids[real][0]
    here = shown.cluster_ids == home
    assert central[real].min() > central[here & ~real].max(initial=-1)
    assert clusters
