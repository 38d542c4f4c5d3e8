"""A bundle that was given names: whole, added to its repository, or untouched."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import onnx
import pytest
from ncd_export.rename import carry_names, keep_names, rename_bundle
from ncd_export.repository import add_to_repository, hardware_of
from ncd_export.triton_config import Hardware
from ncd_training.data.carried import Carried

from ncd_serve.bundle import Ancestor, Bundle, Change
from ncd_serve.errors import DataError
from ncd_serve.naming import Names
from tests.export.folders import unchanged


@pytest.fixture
def place(bundle: Path, tmp_path: Path) -> Path:
    """A folder with a bundle and a repository of its own."""
    add_to_repository(Bundle.read(bundle), tmp_path / "models", name="m")
    shutil.copytree(bundle, tmp_path / "bundle")
    return tmp_path


def rename(place: Path, clusters: dict[int, dict[str, object]], *, keep: int | None = None) -> tuple[Bundle, Path]:
    names = Names.model_validate({"clusters": clusters})
    return rename_bundle(place / "bundle", names, repository=place / "models", name="m", keep=keep)


def facts(model: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(model).metadata_props}


def test_all_parts_of_the_bundle_say_the_same(place: Path, bundle: Path) -> None:
    (place / "bundle" / "gallery.html").write_text("somebody's own")
    renamed, version = rename(place, {0: {"name": "gull | *tern*"}, 1: {"merge_into": 0}, 2: {"junk": True}})
    old, new = Bundle.read(bundle).manifest, Bundle.read(place / "bundle").manifest
    assert new == renamed.manifest and new.bundle_id != old.bundle_id
    labels = ["gull | *tern*", "gull | *tern*", "junk", "cluster-3", "cluster-4"]
    assert (new.cluster_names, new.merged, new.junk) == (labels, {1: 0}, [2])
    assert (place / "bundle" / "labels.txt").read_text().splitlines() == labels
    for file in ("verification.json", "reference.npz"):
        assert new.sha256[file] == old.sha256[file]
    assert (place / "bundle" / "gallery.html").read_text() == "somebody's own"
    assert facts(renamed.model_path) == {**facts(bundle / "model.onnx"), "bundle_id": new.bundle_id}
    assert version == place / "models" / "m" / "2"
    assert (version / "model.onnx").read_bytes() == renamed.model_path.read_bytes()
    assert (place / "models" / "m" / "labels.txt").read_text().splitlines() == labels
    jpeg = place / "models" / "m_jpeg" / "2" / "bundle.json"
    assert jpeg.read_bytes() == (place / "bundle" / "bundle.json").read_bytes()


def test_the_card_lists_what_a_person_said(place: Path, bundle: Path) -> None:
    card = place / "bundle" / "MODEL_CARD.md"
    renamed, _ = rename(place, {0: {"name": "gull | <b>"}, 1: {"merge_into": 0}})
    assert card.read_text().endswith(
        "| cluster | name |\n|---|---|\n| 0 | gull \\| \\<b\\> |\n| 1 | gull \\| \\<b\\> (merged into 0) |\n"
    )
    assert f"Bundle `{renamed.manifest.bundle_id}`, created {renamed.manifest.created}" in card.read_text()
    rename(place, {0: {"name": "tern"}, 1: {}, 3: {"junk": True}})
    assert card.read_text().endswith("|---|---|\n| 0 | tern |\n| 3 | junk |\n") and "gull" not in card.read_text()
    renamed, _ = rename(place, {0: {}, 3: {}})
    old = Bundle.read(bundle).manifest
    text = (bundle / "MODEL_CARD.md").read_text().replace(old.bundle_id, renamed.manifest.bundle_id)
    assert card.read_text() == text.replace(old.created, renamed.manifest.created)


def test_undone_merges_leave_the_graph_that_was_verified(place: Path, bundle: Path) -> None:
    rename(place, {1: {"merge_into": 0}})
    renamed, version = rename(place, {1: {}}, keep=2)
    assert onnx.load(renamed.model_path).graph == onnx.load(bundle / "model.onnx").graph
    assert version.name == "3" and not (version.parent / "1").exists()


@pytest.mark.parametrize("hardware", [Hardware(cores=64), Hardware("cuda"), Hardware("tensorrt")])
def test_what_it_is_served_on_stays(hardware: Hardware, place: Path, bundle: Path) -> None:
    add_to_repository(Bundle.read(bundle), place / "models", name="m", hardware=hardware)
    rename(place, {0: {"name": "gull"}})
    assert hardware_of(place / "models", "m") == hardware


def test_a_new_export_keeps_the_names_of_the_same_state(place: Path, bundle: Path) -> None:
    renamed, _ = rename(place, {0: {"name": "gull"}, 1: {"merge_into": 0}, 2: {"junk": True}})
    fresh = Bundle.read(Path(shutil.copytree(bundle, place / "fresh")))
    another = Bundle(fresh.folder, fresh.manifest.model_copy(update={"checkpoint": "ba9876543210"}))
    with unchanged(place):
        assert not keep_names(bundle, fresh), "nothing was named there"
        assert not keep_names(place / "nowhere", fresh)
        assert not keep_names(renamed.folder, another)
    assert keep_names(renamed.folder, fresh)
    for name in ("cluster_names", "merged", "junk"):
        assert getattr(Bundle.read(fresh.folder).manifest, name) == getattr(renamed.manifest, name)
    assert onnx.load(fresh.model_path).graph == onnx.load(renamed.model_path).graph


def test_a_linked_bundle_stays_linked(place: Path) -> None:
    (place / "bundle").rename(place / "first")
    (place / "bundle").symlink_to("first")
    renamed, _ = rename(place, {0: {"name": "gull"}})
    assert (place / "bundle").is_symlink() and Bundle.read(place / "first").manifest == renamed.manifest


def test_failures_leave_bundle_and_repository_as_they_were(place: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with unchanged(place), pytest.raises(DataError, match="cannot write") as failure:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))  # no file may grow larger: the model would
        try:
            rename(place, {0: {"name": "gull"}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "nothing was changed" in str(failure.value.hint)
    for folder in ("m_jpeg", "m"):  # the first is found late, when all else is written
        (place / "models" / folder / "config.pbtxt").write_text('backend: "python"')
        with unchanged(place), pytest.raises(DataError, match=f"{folder} was not made by ncd-serve"):
            rename(place, {0: {"name": "gull"}})


def test_images_that_a_person_gave_to_a_cluster_that_is_gone(place: Path) -> None:
    """They wait under its name, for a cluster with an id that was never used."""
    fresh = Bundle.read(place / "bundle")
    one, other, moved = fresh.reference().every_file()[:3]
    parent = Ancestor(generation=1, bundle_id="b", digest="", folder="b", created="now", clusters=4)
    kinds = {0: "kept", 3: "split", 4: "merged"}
    facts = {"images": 2, "added": 0, "moved": 0}
    carried = Carried(
        bundle=place,
        ancestors=[parent],
        clusters=4,
        first=0,
        ids=[0, 3, 4],
        names=Names.model_validate(
            {
                "clusters": {0: {"name": "auk"}, 3: {"name": "tern"}, 4: {"name": "owl"}},
                "images": {str(one): 4, str(other): 4, str(moved): 0},
            }
        ),
        columns=[],
        said=[],
        wrong=[],
        added=[],
        changes=[Change(cluster_id=number, kind=kind, **facts) for number, kind in kinds.items()],
    )
    assert carry_names(fresh, carried)
    about, root = Bundle.read(fresh.folder).manifest, fresh.reference().root
    assert about.cluster_names == ["auk", *(f"cluster-{number}" for number in range(1, 5))]
    assert about.new_names == {5: "owl"}
    assert about.images == {str(file.relative_to(root)): to for file, to in ((one, 5), (other, 5), (moved, 0))}
