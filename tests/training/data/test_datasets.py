import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from ncd_training.config.schema import DataConfig
from ncd_training.data.datasets import DATASETS, archives, load_manifest
from ncd_training.data.datasets.archives import load_classes, load_split
from ncd_training.data.manifest import Manifest
from PIL import Image

from ncd_serve.errors import DataError, UsageError

FOLDER = Path(str(files("ncd_training.data.datasets") / "splits"))
LISTS = ("imagenet-118", "imagenet100-open")
SPLITS = (
    "aircraft",
    "cifar10",
    "cifar100",
    "cub200",
    "imagenet-a",
    "imagenet-b",
    "imagenet-c",
    "imagenet100",
    "stanford-cars",
)


def test_the_shipped_splits_are_the_published_ones() -> None:
    sizes = {name: (len(load_split(name).known), len(load_split(name).novel)) for name in SPLITS}
    assert sizes == {
        "aircraft": (80, 20),
        "cifar10": (5, 5),
        "cifar100": (80, 20),
        "cub200": (160, 40),
        "imagenet-a": (0, 30),
        "imagenet-b": (0, 30),
        "imagenet-c": (0, 30),
        "imagenet100": (70, 30),
        "stanford-cars": (156, 40),
    }
    assert all(len(set(split.classes)) == len(split.classes) for split in map(load_split, SPLITS))
    assert {f"{name}.json" for name in LISTS + SPLITS} == {path.name for path in FOLDER.glob("*.json")}


def test_imagenet_s_lists_overlap_as_published() -> None:
    aside = load_classes("imagenet-118")
    a, b, c = (set(load_split(f"imagenet-{letter}").novel) for letter in "abc")
    assert len(aside) == len(set(aside)) == 118
    assert a | b | c <= set(aside)
    assert [len(a & b), len(a & c), len(b & c), len(a | b | c)] == [7, 7, 7, 72]
    hundred = set(load_split("imagenet100").classes)
    assert (len(hundred), len(set(load_classes("imagenet100-open")))) == (100, 100)
    assert len(hundred & set(load_classes("imagenet100-open"))) == 12


def test_a_changed_split_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER, tmp_path / "splits")
    monkeypatch.setattr(archives, "_FOLDER", tmp_path / "splits")
    file = tmp_path / "splits" / "cifar10.json"
    assert load_split("cifar10").novel[0] == "dog"
    file.write_text(file.read_text().replace('"dog"', '"cow"'))
    with pytest.raises(DataError, match=r"cifar10\.json was changed"):
        load_split("cifar10")


def test_glyphs_are_drawn_once_and_the_same_for_a_seed(tmp_path: Path) -> None:
    from ncd_training.data.datasets.glyphs import write_glyphs

    first, second, other = (
        write_glyphs(tmp_path / name, train=1, test=1, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    pictures = [{p.relative_to(root): p.read_bytes() for p in root.rglob("*.png")} for root in (first, second, other)]
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.parametrize(
    ("data", "kind", "hint"),
    [
        ({"dataset": "cub20"}, UsageError, "did you mean 'cub200'?"),
        ({"dataset": "scars"}, UsageError, "did you mean 'stanford-cars'?"),
        ({"dataset": "stanford_cars"}, UsageError, "did you mean 'stanford-cars'?"),
        ({"dataset": "CIFAR-100"}, UsageError, "did you mean 'cifar100'?"),
        ({"dataset": "imagenet"}, UsageError, "did you mean 'imagenet-a'?"),
        ({"dataset": "cub200", "root": "nowhere"}, DataError, "official archive there (CUB_200_2011.tgz)"),
        ({}, UsageError, "--dataset"),
        ({"labelled": "nowhere", "unlabelled": "nowhere"}, DataError, "check the path"),
    ],
)
def test_what_is_missing_is_said(data: dict[str, str], kind: type[Exception], hint: str) -> None:
    with pytest.raises(kind) as caught:
        load_manifest(DataConfig.model_validate(data))
    assert hint in caught.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"glyphs"}))
def test_a_missing_archive_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"dataset '{name}' is not at {tmp_path}: there is no ") as caught:
        load_manifest(DataConfig(dataset=name, root=tmp_path))
    assert DATASETS[name].archive in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("labelled", "unlabelled", "message"),
    [
        (["a/1.png", "a/2.png"], ["x.png", "y.png"], "only one known class"),
        (["a/1.png", "a/2.png", "b/1.png"], ["x.png", "y.png"], "'b' has fewer than 2 images"),
        (["a/1.png", "a/2.png", "b/1.png", "b/2.png"], ["x.png"], "2 clusters, but only 1 unlabelled"),
        ([], ["x.png"], "no images in class folders"),
        (["a/1.png", "a/2.png", "b/1.png", "b/2.png"], [], "no images in"),
    ],
)
def test_unusable_folders_are_refused(labelled: list[str], unlabelled: list[str], message: str, tmp_path: Path) -> None:
    for root, names in (("known", labelled), ("pile", unlabelled)):
        (tmp_path / root).mkdir()
        for name in names:
            path = tmp_path / root / name
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (8, 8)).save(path)

    def load() -> Manifest:
        manifest = load_manifest(DataConfig(labelled=tmp_path / "known", unlabelled=tmp_path / "pile"))
        manifest.check(2)
        return manifest

    with pytest.raises(DataError, match=message):
        load()
