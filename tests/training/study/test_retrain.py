"""The next generation by training: ids and names that are kept, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ncd_export.repository import add_to_repository
from ncd_training import open_run
from ncd_training.api import retrain
from ncd_training.base.run_dir import RunDir
from ncd_training.data.carried import Carried
from ncd_training.data.datasets.glyphs import NOVEL, draw_glyph
from ncd_training.study.retrain import Undecided, retrain_setup

from ncd_serve.bundle import Bundle, Change
from ncd_serve.cli.after import show_generation
from ncd_serve.discovery.find import Candidates
from ncd_serve.discovery.history import generations
from ncd_serve.errors import DataError, UsageError
from ncd_serve.runners import OnnxRunner
from tests.conftest import Ncd
from tests.export.folders import unchanged
from tests.killed import kill_at
from tests.runs import SILENT, again


@pytest.fixture
def place(tiny_run: Path, bundle: Path, tmp_path: Path) -> Path:
    """A run with its bundle, two names, a category of one old image that a person began, and two more corrections.

    Ten of the new images are an accepted candidate for that category.
    """
    shutil.copytree(tiny_run, tmp_path / "run")
    shutil.copytree(bundle, tmp_path / "run" / "bundle")
    opened = Bundle.read(tmp_path / "run" / "bundle")
    paths, names = opened.reference().paths, ["auk", "tern", *opened.manifest.cluster_names[2:]]
    images = {paths[0]: 1, paths[1]: "wrong", paths[2]: 5}
    said = {"cluster_names": names, "images": images, "new_names": {5: "seven"}}
    (opened.folder / "bundle.json").write_text(opened.manifest.model_copy(update=said).model_dump_json())
    rng = np.random.default_rng(1)
    (tmp_path / "new").mkdir()
    for number, letter in enumerate("7" * 10 + "".join(NOVEL) * 3):
        draw_glyph(letter, rng).save(tmp_path / "new" / f"{letter}-{number:02d}.png")
    sevens = [str(file) for file in sorted((tmp_path / "new").glob("7*"))]
    facts = {"checkpoint": opened.manifest.checkpoint, "generation": 1}
    found = Candidates(**facts, candidates=[{"name": "seven", "images": sevens}])
    (tmp_path / "candidates.json").write_text(found.model_dump_json())
    return tmp_path


def setup_of(place: Path, **options: Any) -> Any:
    given = {"accept": place / "candidates.json", "promote": False, **options}
    return retrain_setup(place / "run" / "bundle", place / "new", progress=SILENT, **given)


def test_labels_are_taken_along(place: Path) -> None:
    setup = setup_of(place)
    carried, reference = setup.carried, Bundle.read(place / "run" / "bundle").reference()
    columns = dict(zip(setup.manifest.unlabelled, carried.columns, strict=True))
    said = dict(zip(setup.manifest.unlabelled, carried.said, strict=True))
    files = reference.files()
    assert carried.ids[columns[files[0]]] == 1 and said[files[0]], "a person moved it"
    assert columns[files[1]] == -1, "it is in none"
    assert carried.ids[carried.wrong[setup.manifest.unlabelled.index(files[1])]] == reference.cluster_ids[1]
    sevens = [files[2], *(file for file in columns if file.name.startswith("7-"))]
    assert {carried.ids[columns[file]] for file in sevens} == {5} and all(said[file] for file in sevens)
    assert sum(carried.said) == 12 and sum(carried.added) == 25
    promoted = setup_of(place, promote=True).carried
    named = sum(number in (0, 1) for number in reference.cluster_ids[3:].tolist())
    assert sum(promoted.said) == 12 + named
    assert setup.config.data.novel_classes == len(carried.ids) and setup.manifest.truth is None


def test_corrections_alone_are_learned(place: Path) -> None:
    bundle = place / "run" / "bundle"
    options: Any = {"accept": None, "promote": False, "progress": SILENT}
    carried = retrain_setup(bundle, None, **options).carried
    assert carried is not None
    assert sum(carried.said) == 2 and sum(number >= 0 for number in carried.wrong) == 1 and not any(carried.added)
    manifest = Bundle.read(bundle).manifest.model_copy(update={"images": {}, "new_names": {}})
    (bundle / "bundle.json").write_text(manifest.model_dump_json())
    with pytest.raises(DataError, match="there is nothing to learn"):
        retrain_setup(bundle, None, **options)


def test_what_is_trained_has_the_ids_and_names_of_before(place: Path) -> None:
    with unchanged(place / "run"):
        run = retrain(
            place / "run" / "bundle", place / "new", accept=place / "candidates.json", promote=True, progress=False
        )
    assert run.path.resolve() == place / "run-2"
    forming = {each["name"] for each in json.loads((run.path / "forming.json").read_bytes())["clusters"]}
    assert "seven" in forming and forming <= {"auk", "tern", "seven", "cluster-2", "cluster-3", "cluster-4"}
    ids, changes = [change.cluster_id for change in run.changes], {c.cluster_id: c for c in run.changes}
    assert ids == [*range(len(ids))] and len(ids) >= 6 and changes[5].kind in ("new", "split", "merged")
    gone = [number for number, change in changes.items() if change.kind in ("split", "merged")]
    assert {each.cluster_id for each in run.undecided} == {number for number in gone if number in (0, 1, 5)}
    add_to_repository(Bundle.read(place / "run" / "bundle"), place / "models", name="birds")
    exported = run.export(repository=place / "models", model_name="birds")
    assert (place / "models" / "birds" / "2" / "model.onnx").is_file(), "the model that served before goes on"
    about = exported.manifest
    assert (about.generation, len(about.ancestors), len(about.cluster_names)) == (2, 1, len(ids))
    for number, name in enumerate(("auk", "tern")):
        kept = changes[number].kind in ("kept", "grown")
        assert about.cluster_names[number] == (name if kept else f"cluster-{number}"), "never a wrong name"
    assert "seven" in (about.cluster_names[5], *about.new_names.values()), "a person gave an image to it"
    counts = exported.reference().counts
    assert not counts[gone].any() and counts.sum() == len(again(RunDir.open(run.path)).manifest.unlabelled)
    side = about.preprocess.resolution
    images = np.random.default_rng(0).integers(0, 255, (8, side, side, 3), np.uint8)
    answer = OnnxRunner(exported).answer(images)
    assert answer.probabilities.shape[1] == len(ids) and answer.probabilities[:, gone].max(initial=0) == 0
    first, second = generations(exported.folder)
    assert (first.generation, second.generation, first.images) == (1, 2, 20) and first.folder
    assert "unlabelled-train" in first.scores and "of 10 images in the right cluster" in first.verdict
    assert set(second.scores) == {"known-test"}, "true classes of new images are not known"
    assert Carried.read(RunDir(run.path)) and open_run(run.path, progress=False).resume().changes == run.changes


def test_a_killed_training_leaves_the_old_generation_and_goes_on(place: Path, ncd: Ncd) -> None:
    """It is killed when all is trained, before clusters get the ids that they had."""
    command = ["train", "--after", "run/bundle", "--add", "new", "--accept", "candidates.json", "--retrain"]
    with unchanged(place / "run"):
        kill_at("os.rename", "placed.safetensors", *command, cwd=place)
    again = ncd(*command, cwd=place)
    assert again.returncode == 2 and "--resume run-2" in again.stderr
    resumed = ncd("train", "--resume", "run-2", cwd=place)
    assert resumed.returncode == 0 and resumed.stdout.splitlines()[-1] == "next: ncd-serve export run-2", resumed.stderr
    assert {change.cluster_id for change in open_run(place / "run-2", progress=False).changes} >= {*range(6)}


def test_what_is_refused_leaves_all_as_it_was(place: Path) -> None:
    old, appended = place / "run" / "bundle", "can still be appended"
    foreign = place / "alone" / "bundle"
    shutil.copytree(old, foreign)
    with unchanged(place):
        with pytest.raises(DataError, match="in no run directory") as caught:
            retrain_setup(foreign, place / "new", accept=None, promote=False, progress=SILENT)
        assert appended in str(caught.value.hint)
        with pytest.raises(UsageError, match="already holds a run"):
            retrain(old, place / "new", out=place / "run", progress=False)
    shutil.copytree(Bundle.read(old).reference().root, place / "copies")
    with pytest.raises(DataError, match="all new images are copies of old ones"):
        retrain_setup(old, place / "copies", accept=place / "candidates.json", promote=False, progress=SILENT)
    checkpoint = place / "run" / "checkpoints" / "last.safetensors"
    shutil.copy(checkpoint.with_name("initial.safetensors"), checkpoint)
    with pytest.raises(DataError, match="another model than") as caught:
        setup_of(place)
    assert appended in str(caught.value.hint)


def test_old_images_that_are_gone(place: Path, glyphs: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    image = Bundle.read(place / "run" / "bundle").reference().files()[3]
    shutil.move(image, moved)
    try:
        with pytest.raises(DataError, match="have changed since the run was started") as caught:
            setup_of(place)
        assert "can still be appended: that needs no old image" in str(caught.value.hint)
    finally:
        shutil.move(moved, image)


def test_a_person_is_asked_about_names_that_no_cluster_clearly_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Cluster 0 was split: 5 has most of its images; cluster 1 went into 2, which has a name of its own."""
    facts = {"images": 10, "added": 0, "moved": 10}
    changes = [
        Change(cluster_id=0, kind="split", overlap=0.4, like=5, **facts),
        Change(cluster_id=1, kind="merged", overlap=0.3, like=2, **facts),
        Change(cluster_id=2, kind="kept", overlap=0.7, **{**facts, "moved": 0}),
        Change(cluster_id=5, kind="new", overlap=0.4, **facts),
    ]
    undecided = [Undecided(0, "auk", "split", 0.4, 5), Undecided(1, "tern", "merged", 0.3, 2)]
    show_generation(
        SimpleNamespace(  # type: ignore[arg-type]
            changes=changes, carried_names={2: "gull"}, undecided=undecided, unnamed={5}, path=Path("runs/birds-2")
        )
    )
    printed = capsys.readouterr().out
    assert "undecided: 'auk' was cluster 0, now split; cluster 5 overlaps by 40%" in printed
    assert "undecided: 'tern' was cluster 1, now merged; cluster 2 overlaps by 30%" in printed
    assert '{"clusters": {"5": {"name": "auk"}}}' in printed, "cluster 2 has a name"
    assert printed.splitlines()[-1] == "next: ncd-serve export runs/birds-2"
