"""The next generation of a bundle: new clusters, and old answers bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from ncd_export.append import append_generation, next_folder
from ncd_export.rename import rename_bundle

from ncd_serve.bundle import Bundle
from ncd_serve.discovery.find import Candidates, discover, mixture_of
from ncd_serve.discovery.history import generations
from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import sha256
from ncd_serve.naming import Names
from ncd_serve.progress import SILENT
from ncd_serve.runners import open_session
from tests.export.folders import unchanged
from tests.killed import kill_at
from tests.serve.patterns import CLUSTERS, EACH, KNOWN, draw, make_bundle, save

NEW, NEWER = 20, 21
NAMES = {0: {"name": "auk"}, 1: {"merge_into": 0}}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patterns")
    make_bundle(folder / "bundle")
    for kind in (0, KNOWN, KNOWN + 1, NEW):
        save(folder / "new", kind, 25, seed=1)
    return folder


@pytest.fixture
def place(template: Path, tmp_path: Path) -> Path:
    """A bundle, a batch with a new class, and no image of training."""
    shutil.copytree(template / "bundle", tmp_path / "bundle")
    shutil.copytree(template / "new", tmp_path / "new")
    return tmp_path


def answers(bundle: Path, images: np.ndarray) -> dict[str, np.ndarray]:
    session = open_session(bundle / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"image": images}), strict=True))


def append(place: Path, out: str = "second", **options: Any) -> Bundle:
    return append_generation(place / "bundle", place / "new", out=place / out, progress=SILENT, **options)


def everything() -> tuple[np.ndarray, np.ndarray]:
    kinds = [*range(KNOWN + CLUSTERS), NEW, NEWER]
    return np.concatenate([draw(kind, 20, seed=9) for kind in kinds]), np.repeat(kinds, 20)


def same(before: dict[str, np.ndarray], after: dict[str, np.ndarray], stay: np.ndarray) -> None:
    """All that a model answers about images that go to no new cluster is the same; what is outside has changed."""
    for name in ("cluster_id", "confidence", "probabilities", "embedding", "fit"):
        now = after[name][:, : before[name].shape[1]] if name == "probabilities" else after[name]
        assert np.array_equal(before[name][stay], now[stay]), name


def test_new_images_get_a_new_cluster_and_all_others_the_old_answer(place: Path) -> None:
    with unchanged(place / "bundle"):
        second = append(place)
    images, kinds = everything()
    before, after = answers(place / "bundle", images), answers(place / "second", images)
    assert set(after["cluster_id"][kinds == NEW]) == {CLUSTERS}
    stay = after["cluster_id"] < CLUSTERS
    assert stay[kinds != NEW].mean() > 0.95
    same(before, after, stay)
    assert after["probabilities"].shape[1] == CLUSTERS + 1
    assert after["probabilities"].sum(1) == pytest.approx(1, abs=1e-5)
    assert before["outside"][kinds == NEW].min() > 0.9 and after["outside"][kinds == NEW].max() < 0.1
    assert after["outside"][kinds == NEWER].min() > 0.9
    mixture, limits = second.reference().mixture(), second.reference().limits()
    assert mixture is not None
    np.testing.assert_allclose(after["outside"], mixture.outside(after["embedding"]), atol=1e-3)
    judged = limits.judge(after["embedding"], after["cluster_id"], after["confidence"])
    assert (after["fit"] == judged)[kinds == NEW].mean() > 0.9


def test_its_facts(place: Path) -> None:
    first, second = Bundle.read(place / "bundle"), append(place)
    about = second.manifest
    assert about.cluster_names == [*first.manifest.cluster_names, f"cluster-{CLUSTERS}"]
    assert (about.generation, about.checkpoint) == (2, first.manifest.checkpoint)
    (parent,) = about.ancestors
    assert (parent.generation, parent.digest, parent.clusters) == (1, first.digest, CLUSTERS)
    card, model = (second.folder / "MODEL_CARD.md").read_text(), onnx.load(second.model_path)
    assert f"## Generation 2\nAppended to bundle `{parent.bundle_id}`: cluster 3, from 25 images." in card
    assert {entry.key: entry.value for entry in model.metadata_props} == {"bundle_id": about.bundle_id}
    kinds = [change.kind for change in about.changes]
    assert kinds == ["grown", "grown", "kept", "new"]
    assert [change.added for change in about.changes] == [25, 25, 0, 25] and not any(c.moved for c in about.changes)
    assert second.reference().counts.tolist()[-1] == 25
    assert [each.generation for each in generations(place / "second")] == [1, 2]
    shutil.rmtree(place / "bundle")
    gone, here = generations(place / "second")
    assert gone.folder is None and here.changes == "2 grown; 1 kept; 1 new (cluster-3)"


def test_generations_follow_each_other(place: Path) -> None:
    append(place)
    save(place / "newer", NEWER, 25, seed=1)
    save(place / "newer", NEW, 25, seed=2)
    out = next_folder(place / "second")
    assert out.name == "second-3"
    third = append_generation(place / "second", place / "newer", out=place / out.name, progress=SILENT)
    assert third.manifest.cluster_names[-2:] == ["cluster-3", "cluster-4"]
    assert [parent.generation for parent in third.manifest.ancestors] == [1, 2]
    images, kinds = everything()
    before, after = answers(place / "second", images), answers(third.folder, images)
    assert set(after["cluster_id"][kinds == NEWER]) == {CLUSTERS + 1}
    assert set(after["cluster_id"][kinds == NEW]) == {CLUSTERS}
    same(before, after, after["cluster_id"] <= CLUSTERS)


def test_names_merges_and_corrections_are_taken_along(place: Path) -> None:
    own = [str(path) for path in save(place / "own", NEWER, 5)]
    corrections = {path: CLUSTERS for path in own} | {str(place / "new" / "x.png"): "wrong"}
    names = Names.model_validate({"clusters": NAMES | {CLUSTERS: {"name": "owl"}}, "images": corrections})
    rename_bundle(place / "bundle", names, repository=place / "models", name="m")
    found = discover(place / "new", place / "bundle").candidates
    entry = found.candidates[0].model_copy(update={"name": "gull"})
    (place / "candidates.json").write_text(found.model_copy(update={"candidates": [entry]}).model_dump_json())
    second = append(place, accept=place / "candidates.json")
    assert second.manifest.cluster_names == ["auk", "auk", "cluster-2", "owl", "gull"]
    assert second.manifest.merged == {1: 0} and second.manifest.new_names == {}
    assert sorted(map(str, second.manifest.images.values())) == ["3"] * 5 + ["wrong"]
    images, kinds = everything()
    before, after = answers(place / "bundle", images), answers(second.folder, images)
    assert set(after["cluster_id"][kinds == NEWER]) == {CLUSTERS}, "five images that a person named are a class"
    same(before, after, after["cluster_id"] < CLUSTERS)
    assert set(after["cluster_id"][kinds == KNOWN + 1]) == {0}, "it is merged still"


def test_a_candidate_joins_the_category_that_a_person_began(place: Path) -> None:
    own = [str(path) for path in save(place / "own", NEW, 1, seed=5)]
    names = Names.model_validate({"clusters": {CLUSTERS: {"name": "owl"}}, "images": dict.fromkeys(own, CLUSTERS)})
    rename_bundle(place / "bundle", names, repository=place / "models", name="m")
    found = discover(place / "new", place / "bundle").candidates
    entry = found.candidates[0].model_copy(update={"name": "owl"})
    (place / "candidates.json").write_text(found.model_copy(update={"candidates": [entry]}).model_dump_json())
    second = append(place, accept=place / "candidates.json")
    assert second.manifest.cluster_names[CLUSTERS:] == ["owl"] and second.manifest.new_names == {}
    assert second.reference().counts.tolist() == [EACH] * CLUSTERS + [26]


def test_a_category_of_old_images_that_are_gone(place: Path) -> None:
    """What the bundle's reference has of them is enough."""
    own = make_bundle(place / "own" / "bundle")
    paths = Bundle.read(own).reference().paths[:12]
    names = Names.model_validate({"clusters": {CLUSTERS: {"name": "owl"}}, "images": dict.fromkeys(paths, CLUSTERS)})
    rename_bundle(own, names, repository=place / "models", name="m")
    shutil.rmtree(place / "own" / "pile")
    second = append_generation(own, place / "new", out=place / "second", progress=SILENT)
    assert second.manifest.cluster_names[CLUSTERS:] == ["owl", "cluster-4"]
    assert second.reference().counts.tolist() == [EACH - 12, EACH, EACH, 12, 25]
    assert [change.moved for change in second.manifest.changes[CLUSTERS:]] == [12, 0]


def test_old_images_of_a_candidate_are_in_the_new_cluster_alone(place: Path) -> None:
    """A folder that grows has images of training, too; one of them a person had called wrong before."""
    bundle = Bundle.read(place / "bundle")
    wrong, old = bundle.reference().every_file()[-2:]
    said = Names.model_validate({"clusters": {}, "images": {wrong.name: "wrong"}})
    rename_bundle(bundle.folder, said, repository=place / "models", name="m")
    found = discover(place / "new", place / "bundle").candidates
    entry = found.candidates[0].model_copy(update={"images": [*found.candidates[0].images, str(wrong), str(old)]})
    (place / "candidates.json").write_text(found.model_copy(update={"candidates": [entry]}).model_dump_json())
    second = append(place, accept=place / "candidates.json")
    now = mixture_of(second)[0]
    assert now.counts.tolist() == [EACH, EACH, EACH - 2, 27] and now.aside_paths == []
    assert len(set(now.paths)) == len(now.paths) and [*second.manifest.images.values()] == [CLUSTERS]


def test_corrections_are_labels_of_the_next_generation(place: Path) -> None:
    """Images of cluster 2 that a person gave to cluster 0 or to none no longer speak for cluster 2."""
    paths = Bundle.read(place / "bundle").reference().paths
    moved, wrong = paths[-3:-1], paths[-1]
    names = Names.model_validate({"clusters": {}, "images": {**dict.fromkeys(moved, 0), wrong: "wrong"}})
    rename_bundle(place / "bundle", names, repository=place / "models", name="m")
    before, second = Bundle.read(place / "bundle"), append(place)
    now, old = second.reference(), before.reference()
    assert now.counts.tolist() == [EACH + 2, EACH, EACH - 3, 25]
    assert [change.images for change in second.manifest.changes] == [EACH + 2, EACH, EACH - 3, 0]
    assert len(second.manifest.images) == 3 and not any(Path(wrong).name in path for path in now.paths)
    assert [file.name for file in now.aside_files()] == [Path(wrong).name], "it is in no cluster, and not lost"
    images, _ = everything()
    after = answers(second.folder, images)
    same(answers(before.folder, images), after, after["cluster_id"] < CLUSTERS)
    mixture, first = now.mixture(), old.mixture()
    assert mixture is not None and first is not None and not np.allclose(mixture.means[KNOWN], first.means[KNOWN])
    np.testing.assert_allclose(after["outside"], mixture.outside(after["embedding"]), atol=1e-3)
    (place / "candidates.json").write_text(
        Candidates(
            checkpoint=before.manifest.checkpoint,
            generation=1,
            candidates=[{"images": [str(old.root / path) for path in moved]}],
        ).model_dump_json()
    )
    with unchanged(place), pytest.raises(DataError, match="a correction says that it is in cluster 0"):
        append(place, out="third", accept=place / "candidates.json")


def test_corrections_survive_every_later_round(place: Path) -> None:
    """Two generations later they are about the same files, and can still be taken back."""
    paths = Bundle.read(place / "bundle").reference().paths
    moved, wrong, lone = paths[-2], paths[-1], paths[0]
    said = {moved: 0, wrong: "wrong", lone: CLUSTERS}  # a single image is no cluster yet
    names = Names.model_validate({"clusters": {CLUSTERS: {"name": "owl"}}, "images": said})
    rename_bundle(place / "bundle", names, repository=place / "models", name="m")
    append(place)
    save(place / "far" / "newer", NEWER, 25, seed=1)
    third = append_generation(place / "second", place / "far" / "newer", out=place / "third", progress=SILENT)
    kept = {str(third.reference().root / path): to for path, to in third.manifest.images.items()}
    pile = Bundle.read(place / "bundle").reference().root
    owl = CLUSTERS + 2
    assert kept == {str(pile / moved): 0, str(pile / wrong): "wrong", str(pile / lone): owl}
    assert third.manifest.new_names == {owl: "owl"}
    now = third.reference()
    assert {file.name for file in now.aside_files()} == {Path(wrong).name, Path(lone).name}
    assert now.counts.tolist() == [EACH, EACH, EACH - 2, 25, 25]
    path = next(path for path, to in third.manifest.images.items() if to == "wrong")
    back = Names.model_validate({"clusters": {}, "images": {path: None}})
    rename_bundle(third.folder, back, repository=place / "models", name="m")
    after, _ = mixture_of(Bundle.read(third.folder))
    assert after.counts.tolist() == [EACH, EACH, EACH - 1, 25, 25] and len(after.aside_paths) == 1


def test_a_batch_of_old_images_has_nothing_to_append(place: Path) -> None:
    make_bundle(place / "again" / "bundle")
    for copy in range(2):
        shutil.copytree(place / "again" / "pile", place / "copies" / str(copy))
    with unchanged(place), pytest.raises(DataError, match="nothing to append"):
        append_generation(place / "bundle", place / "copies", out=place / "third", progress=SILENT)


def test_what_is_refused_changes_nothing(place: Path) -> None:
    found = discover(place / "new", place / "bundle").candidates
    first = found.candidates[0]

    def accepted(**changed: Any) -> Path:
        (place / "accepted.json").write_text(found.model_copy(update=changed).model_dump_json())
        return place / "accepted.json"

    half = len(first.images) // 2
    alike = [first.model_copy(update={"images": part, "name": "owl"}) for part in (first.images[:9], first.images[9:])]
    twice = [first.model_copy(update={"images": part}) for part in (first.images[: half + 1], first.images[half:])]
    for changed, reason in (
        ({"checkpoint": "f" * 12}, "of model ffffffffffff"),
        ({"generation": 2}, "of generation 2"),
        ({"candidates": []}, "nothing to append"),
        ({"candidates": twice}, "is in two candidates"),
        ({"candidates": alike}, "two candidates are called 'owl'"),
        ({"candidates": [first.model_copy(update={"name": "cluster-1"})]}, "called 'cluster-1' already"),
        ({"candidates": [first.model_copy(update={"images": ["/gone.png", "/lost.png"]})]}, "none of the 2 images"),
        ({"candidates": [first.model_copy(update={"images": [*first.images, "/gone.png"]})]}, "gone.png"),
    ):
        file = accepted(**changed)
        with unchanged(place), pytest.raises(DataError, match=reason):
            append(place, accept=file)
    with unchanged(place), pytest.raises(UsageError, match="exists"):
        append(place, out="bundle")
    save(place / "old", KNOWN, 30, seed=3)
    with pytest.raises(DataError, match="nothing to append"):
        append_generation(place / "bundle", place / "old", out=place / "third", progress=SILENT)
    assert isinstance(found, Candidates) and not (place / "third").exists()


def test_a_bundle_of_an_older_version_says_what_to_do(place: Path) -> None:
    reference = place / "bundle" / "reference.npz"
    with np.load(reference) as stored:
        older = {
            name: stored[name] for name in stored if name not in ("projection", "offset", "means", "weights", "shape")
        }
    np.savez(reference, **{name: array for name, array in older.items() if not name.startswith("known_place")})
    manifest = json.loads((place / "bundle" / "bundle.json").read_text())
    manifest["sha256"]["reference.npz"] = sha256(reference)
    (place / "bundle" / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="exported by an older version"):
        append(place)


def test_a_reference_of_another_backbone(place: Path) -> None:
    reference = place / "bundle" / "reference.npz"
    with np.load(reference) as stored:
        other = dict(stored)
    for name, axis in (("embeddings", 1), ("projection", 0)):
        other[name] = np.repeat(other[name], 2, axis=axis)
    np.savez(reference, **other)
    manifest = json.loads((place / "bundle" / "bundle.json").read_text())
    manifest["sha256"]["reference.npz"] = sha256(reference)
    (place / "bundle" / "bundle.json").write_text(json.dumps(manifest))
    with unchanged(place), pytest.raises(DataError, match="a reference of another backbone"):
        append(place)


def test_a_batch_of_one_image(place: Path) -> None:
    (one,) = save(place / "one", NEW, 1)
    with unchanged(place), pytest.raises(DataError, match="1 readable images are too few"):
        append_generation(place / "bundle", one, out=place / "third", progress=SILENT)


@pytest.mark.parametrize("event", ["os.mkdir", "os.rename"])
def test_a_killed_command_leaves_the_old_generation_and_can_be_typed_again(place: Path, event: str) -> None:
    with unchanged(place / "bundle"):
        kill_at(event, ".second", "train", "--after", "bundle", "--add", "new", "--out", "second", cwd=place)
        assert not (place / "second").exists()
    append(place)
    assert Bundle.read(place / "second").manifest.generation == 2
    assert [path.name for path in place.iterdir() if path.name.startswith(".second")] == []
