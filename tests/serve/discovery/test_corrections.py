"""Corrections of single images as labels of the next round."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.discovery.corrections import check_accepted, corrected, corrections_of
from ncd_serve.discovery.find import discover, mixture_of
from ncd_serve.errors import DataError
from ncd_serve.naming import Names
from ncd_serve.reference import Reference
from tests.serve.patterns import CLUSTERS, EACH, KNOWN, make_bundle, save


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("patterns") / "bundle").parent


def said(place: Path, images: dict[str, Any], **more: Any) -> Bundle:
    manifest = Bundle.read(place / "bundle").manifest.model_copy(update={"images": images, **more})
    (place / "bundle" / "bundle.json").write_text(manifest.model_dump_json())
    return Bundle.read(place / "bundle")


@pytest.fixture
def place(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_images_count_for_the_cluster_that_a_person_gave_them_to(place: Path) -> None:
    before = Bundle.read(place / "bundle").reference()
    moved, wrong, own = before.paths[0], before.paths[1], before.paths[2]
    bundle = said(place, {moved: 1, wrong: "wrong", own: CLUSTERS}, new_names={CLUSTERS: "owl"})
    after, mixture = mixture_of(bundle)
    assert after.counts.tolist() == [EACH - 3, EACH + 1, EACH]
    assert after.paths[0] == moved and after.cluster_ids[0] == 1 and wrong not in after.paths and own not in after.paths
    old = before.mixture()
    assert old is not None
    members = old.project(before.embeddings[3:EACH])
    np.testing.assert_allclose(mixture.means[KNOWN], members.mean(0), atol=0.02)
    assert np.array_equal(mixture.means[[*range(KNOWN), KNOWN + 2]], old.means[[*range(KNOWN), KNOWN + 2]])
    again = corrected(after, corrections_of(bundle, after))
    assert again is after, "what was learned is not learned twice"
    assert after.aside_paths == [wrong, own] and after.aside_ids.tolist() == [0, 0]


def test_images_that_are_set_aside_come_back(place: Path) -> None:
    """In a later generation, whose file has them in no cluster, a correction is taken back and one is changed."""
    before = Bundle.read(place / "bundle").reference()
    back, elsewhere, stays = before.paths[:3]
    after, mixture = mixture_of(said(place, dict.fromkeys((back, elsewhere, stays), "wrong")))
    after.write(place / "later.npz")
    later = Reference.read(place / "later.npz")
    assert later.aside_paths == [back, elsewhere, stays] and later.counts.tolist() == [EACH - 3, EACH, EACH]
    root = later.root
    now = corrected(later, {str(root / elsewhere): 1, str(root / stays): "wrong"})
    assert now.counts.tolist() == [EACH - 2, EACH + 1, EACH] and now.aside_paths == [stays]
    assert now.cluster_ids[[now.paths.index(back), now.paths.index(elsewhere)]].tolist() == [0, 1]
    old, new = before.mixture(), corrected(later, {}).mixture()
    assert old is not None and new is not None and not np.allclose(mixture.means, old.means, atol=1e-3)
    np.testing.assert_allclose(new.means, old.means, atol=1e-3)
    np.testing.assert_allclose(new.weights, old.weights, atol=1e-3)


def test_an_image_that_a_person_judged_is_not_new(place: Path) -> None:
    images = [str(file) for file in save(place / "new", 20, 25, seed=1)]
    for file in images[:10]:
        shutil.copy(file, place / "pile" / Path(file).name)
    bundle = said(place, dict.fromkeys(images[:10], 1))
    save(place / "new", KNOWN, 25, seed=1)
    (candidate,) = discover(place / "new", bundle).candidates.candidates
    assert set(candidate.images) == set(images[10:])


@pytest.mark.parametrize("other", ["./{}", "{root}/{}"])
def test_two_corrections_of_one_image(place: Path, other: str) -> None:
    reference = Bundle.read(place / "bundle").reference()
    path = reference.paths[0]
    twice = other.format(path, root=reference.root)
    with pytest.raises(DataError, match=r"contradict each other: .* is said to be in cluster 1 and in no cluster"):
        discover(place / "pile", said(place, {path: 1, twice: "wrong"}))
    assert corrections_of(said(place, {path: 1, twice: 1}), reference) == {str(reference.root / path): 1}


def test_two_corrections_of_copies(place: Path) -> None:
    reference = Bundle.read(place / "bundle").reference()
    reference.embeddings[1] = reference.embeddings[0]
    bundle = said(place, {reference.paths[0]: 1, reference.paths[1]: 2})
    with pytest.raises(DataError, match="the same image, is said to be in cluster 1 and in cluster 2"):
        corrections_of(bundle, reference)


def test_a_correction_and_a_new_category(place: Path) -> None:
    with pytest.raises(DataError, match="a correction says that it is in cluster 2"):
        check_accepted({"/a.png": 2, "/b.png": "wrong"}, ["/b.png", "/c.png", "/./a.png"])


def test_two_entries_in_one_file(tmp_path: Path) -> None:
    for text, key in (
        ('{"clusters": {}, "images": {"a.jpg": 1, "./a.jpg": "wrong"}}', "a.jpg"),
        ('{"clusters": {"3": {"name": "gull"}, "3": {"name": "tern"}}}', "3"),
    ):
        (tmp_path / "names.json").write_text(text)
        with pytest.raises(DataError, match=f"contradicting entries for '[./]*{key}'"):
            Names.read(tmp_path / "names.json")
    (tmp_path / "names.json").write_text('{"clusters": {}, "images": {"a.jpg": 1, "a.jpg": 1}}')
    assert Names.read(tmp_path / "names.json").images == {"a.jpg": 1}


def test_no_image_is_left(place: Path) -> None:
    reference = Bundle.read(place / "bundle").reference()
    with pytest.raises(DataError, match="no image is left"):
        mixture_of(said(place, dict.fromkeys(reference.paths, "wrong")))
