"""Every named dataset from a tiny archive in its official layout."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from ncd_training.config.schema import DataConfig
from ncd_training.data.datasets import load_manifest
from ncd_training.data.datasets.archives import Split, load_classes, load_split
from ncd_training.data.manifest import Manifest
from PIL import Image
from scipy.io import savemat

from ncd_serve.errors import DataError

REAL_CUB = Path(__file__).parents[4] / "shared" / "data" / "CUB_200_2011"


def load(name: str, root: Path) -> Manifest:
    return load_manifest(DataConfig(dataset=name, root=root))


def assert_follows(manifest: Manifest, split: Split, *, train: int, test: int) -> None:
    """So many images of every class, numbered in the order of the split."""
    known, novel = range(len(split.known)), range(len(split.novel))
    assert (manifest.known_classes, manifest.novel_names) == (list(split.known), split.novel)
    assert manifest.novel_classes == len(split.novel)
    assert [label for _, label in manifest.labelled] == [number for number in known for _ in range(train)]
    assert manifest.truth == [number for number in novel for _ in range(train)]
    assert [label for _, label in manifest.known_test] == [number for number in known for _ in range(test)]
    assert [label for _, label in manifest.novel_test] == [number for number in novel for _ in range(test)]
    assert manifest.published


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def mirror(root: Path, names: Iterable[str]) -> Path:
    """Class folders with two training images and a test image each."""
    touch(*(root / place / name.replace("/", "-") / f"{copy}.jpg" for name in names for place, copy in PLACES))
    return root


PLACES = (("train", 0), ("train", 1), ("test", 0))


# CUB


def make_cub(root: Path) -> Path:
    """Two training images and one test image of each class; the paths are all there is of images."""
    lines: dict[str, list[str]] = {name: [] for name in ("images", "image_class_labels", "train_test_split", "classes")}
    for label, name in enumerate(load_split("cub200").classes, start=1):
        lines["classes"].append(f"{label} {name}")
        for copy in range(3):
            number = len(lines["images"]) + 1
            lines["images"].append(f"{number} {name}/{copy}.jpg")
            lines["image_class_labels"].append(f"{number} {label}")
            lines["train_test_split"].append(f"{number} {int(copy < 2)}")
    root.mkdir()
    for file, rows in lines.items():
        (root / f"{file}.txt").write_text("\n".join(rows) + "\n")
    return root


@pytest.mark.parametrize("given", ["the folder", "the one around it"])
def test_cub_splits_by_class_number(given: str, tmp_path: Path) -> None:
    root = make_cub(tmp_path / "CUB_200_2011")
    manifest = load("cub200", root if given == "the folder" else tmp_path)
    assert_follows(manifest, load_split("cub200"), train=2, test=1)
    assert manifest.known_classes[-1] == "160.Black_throated_Blue_Warbler"
    assert manifest.unlabelled[0] == root / "images" / "161.Blue_winged_Warbler" / "0.jpg"


def test_cub_lists_that_disagree(tmp_path: Path) -> None:
    root = make_cub(tmp_path / "CUB_200_2011")
    (root / "train_test_split.txt").write_text("1 1\n")
    with pytest.raises(DataError, match="disagree at '2'"):
        load("cub200", root)
    (root / "classes.txt").write_text("1 001.Dodo\n")
    with pytest.raises(DataError, match="names 1 classes, but the split has 200"):
        load("cub200", root)


@pytest.mark.skipif(not REAL_CUB.is_dir(), reason="the real images are not beside this clone")
def test_real_cub_has_the_published_training_images() -> None:
    manifest = load("cub200", REAL_CUB)
    assert (len(manifest.labelled), len(manifest.unlabelled)) == (4796, 1198)
    assert all(path.is_file() for path in manifest.images)
    if len(manifest.known_test) < 4614:
        assert "known-test 800 instead of 4,614, novel-test 200 instead of 1,180" in manifest.notes[0]


# Stanford-Cars


def make_cars(root: Path, *, test_labels: bool = True) -> Path:
    names = load_split("stanford-cars").classes
    (root / "devkit").mkdir(parents=True)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array([names], dtype=object)})
    fields = [(name, object) for name in ("bbox_x1", "class", "fname")]
    for file, copies in (("devkit/cars_train_annos.mat", 2), ("cars_test_annos_withlabels.mat", 1)):
        rows = [(1, label, f"{label:03d}{copy}.jpg") for copy in range(copies) for label in range(1, 197)]
        if copies == 2 or test_labels:
            table = np.empty((1, len(rows)), dtype=fields)
            table[0] = rows
            savemat(root / file, {"annotations": table})
    return root


def test_cars_split_by_devkit_number(tmp_path: Path) -> None:
    root = make_cars(tmp_path / "stanford_cars")
    manifest = load("stanford-cars", tmp_path)
    assert_follows(manifest, load_split("stanford-cars"), train=2, test=1)
    assert manifest.labelled[:2] == [(root / "cars_train" / "0010.jpg", 0), (root / "cars_train" / "0011.jpg", 0)]
    assert manifest.novel_test[0] == (root / "cars_test" / "1570.jpg", 0)
    assert manifest.novel_names[0] == "MINI Cooper Roadster Convertible 2012"


def test_cars_without_test_labels_are_trained_on_all_the_same(tmp_path: Path) -> None:
    make_cars(tmp_path / "stanford_cars", test_labels=False)
    manifest = load("stanford-cars", tmp_path)
    assert (len(manifest.labelled), manifest.known_test) == (312, ())
    assert "no cars_test_annos_withlabels.mat" in manifest.notes[-1]


def test_a_broken_devkit_is_named(tmp_path: Path) -> None:
    root = make_cars(tmp_path / "stanford_cars")
    (root / "devkit" / "cars_train_annos.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    with pytest.raises(DataError, match="cars_train_annos"):
        load("stanford-cars", root)


@pytest.mark.parametrize(("name", "folder"), [("cub200", "CUB_200_2011"), ("stanford-cars", "stanford_cars")])
def test_mirrors_with_class_folders(name: str, folder: str, tmp_path: Path) -> None:
    split = load_split(name)
    mirror(tmp_path / folder, split.classes)
    assert_follows(load(name, tmp_path), split, train=2, test=1)
    assert_follows(load(name, tmp_path / folder), split, train=2, test=1)


def test_a_mirror_s_sorted_names_split_like_the_devkit() -> None:
    split = load_split("stanford-cars")
    assert set(sorted(split.classes)[-40:]) == set(split.novel)


def test_a_mirror_without_a_class(tmp_path: Path) -> None:
    root = mirror(tmp_path, load_split("cub200").classes[:-2])
    with pytest.raises(DataError, match=r"'cub200' has no training images of class '199.Winter_Wren' and 1 more"):
        load("cub200", root)


# FGVC-Aircraft


def make_aircraft(root: Path) -> Path:
    data = root / "fgvc-aircraft-2013b" / "data"
    (data / "images").mkdir(parents=True)
    names = load_split("aircraft").classes
    (data / "variants.txt").write_text("\n".join(names) + "\n")
    picture = Image.new("RGB", (40, 50), "navy")
    picture.paste("white", (0, 30, 40, 50))
    for part, first in (("trainval", 1_000_000), ("test", 2_000_000)):
        rows = [f"{first + number} {name}" for number, name in enumerate(names)]
        (data / f"images_variant_{part}.txt").write_text("\n".join(rows) + "\n")
        for number in range(len(names)):
            picture.save(data / "images" / f"{first + number}.jpg")
    return data


def test_aircraft_are_80_and_20_without_their_banners(tmp_path: Path) -> None:
    data = make_aircraft(tmp_path)
    (data / "images" / "1000007.jpg").write_bytes(b"no picture")
    (data / "images" / "1000008.jpg").unlink()
    manifest = load("aircraft", tmp_path)
    assert_follows(manifest, load_split("aircraft"), train=1, test=1)
    assert (len(manifest.known_classes), manifest.novel_classes) == (80, 20)
    assert "the paper says 81 and 21" in manifest.notes[0]
    assert "train 100 instead of 6,667" in manifest.notes[1]
    with Image.open(manifest.labelled[0][0]) as picture:
        assert picture.size == (40, 30)
        assert picture.getpixel((20, 29))[2] > 100 > picture.getpixel((20, 29))[0]  # type: ignore[index]
    assert manifest.labelled[7][0].read_bytes() == b"no picture", "left for the scan to name"
    assert not manifest.labelled[8][0].exists()


def test_cropped_aircraft_are_written_once(tmp_path: Path) -> None:
    make_aircraft(tmp_path)
    first = load("aircraft", tmp_path).labelled[0][0]
    before = first.stat().st_mtime_ns
    assert load("aircraft", tmp_path / "fgvc-aircraft-2013b").labelled[0][0].stat().st_mtime_ns == before


# ImageNet


def make_imagenet(root: Path) -> Path:
    """The real class names where a list has them, made-up ones to fill up to 1000."""
    lists = ("imagenet-118", "imagenet100-open")
    names = {name for list_ in lists for name in load_classes(list_)} | set(load_split("imagenet100").classes)
    names |= {f"n9{number:07d}" for number in range(1000 - len(names))}
    for name in names:
        touch(*(root / "train" / name / f"{name}_{copy}.JPEG" for copy in range(2)), root / "val" / name / "v.JPEG")
    return root


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_imagenet(tmp_path_factory.mktemp("data") / "imagenet")


@pytest.mark.parametrize("letter", "abc")
def test_imagenet_has_882_known_and_30_novel_classes(letter: str, imagenet: Path) -> None:
    manifest = load(f"imagenet-{letter}", imagenet)
    known = tuple(manifest.known_classes)
    assert len(known) == 882
    assert known == tuple(sorted(known))
    assert not set(known) & set(load_classes("imagenet-118"))
    split = load_split(f"imagenet-{letter}").model_copy(update={"known": known})
    assert_follows(manifest, split, train=2, test=1)
    assert "three novel lists" in manifest.notes[0]


def test_imagenet_100_takes_its_classes_from_all_or_from_just_these(imagenet: Path, tmp_path: Path) -> None:
    split = load_split("imagenet100")
    assert_follows(load("imagenet100", imagenet.parent), split, train=2, test=1)
    touch(*(tmp_path / "imagenet100" / "train" / name / "x.JPEG" for name in split.classes))
    manifest = load("imagenet100", tmp_path)
    assert_follows(manifest, split, train=1, test=0)
    assert "first 70 in sorted order" in manifest.notes[0]
    assert "no scores on held-out images" in manifest.notes[-1]


def test_imagenet_needs_all_classes(tmp_path: Path) -> None:
    touch(tmp_path / "train" / "n01440764" / "x.JPEG", tmp_path / "train" / ".ipynb_checkpoints" / "x.JPEG")
    with pytest.raises(DataError, match="holds 1 class folders, but ImageNet-1K has 1,000"):
        load("imagenet-a", tmp_path)


def test_imagenet_as_kaggle_packs_it(tmp_path: Path) -> None:
    split = load_split("imagenet100")
    folder = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    touch(*(folder / "train" / name / "x.JPEG" for name in split.classes))
    touch(folder / "val" / "ILSVRC2012_val_00000001.JPEG", folder / "val" / "ILSVRC2012_val_00000002.JPEG")
    with pytest.raises(DataError, match="have no labels"):
        load("imagenet100", tmp_path)
    rows = [f"ILSVRC2012_val_0000000{n},{name} 1 2 3 4 \n" for n, name in ((1, split.novel[3]), (2, "n00000000"))]
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows))
    manifest = load("imagenet100", tmp_path)
    assert (manifest.known_test, manifest.novel_test) == ((), ((folder / "val" / "ILSVRC2012_val_00000001.JPEG", 3),))


@pytest.mark.parametrize("known", [50, 25])
def test_in_an_open_world_the_pile_holds_known_classes_too(known: int, imagenet: Path) -> None:
    manifest = load(f"imagenet100-open{known}", imagenet)
    names = load_classes("imagenet100-open")
    assert (manifest.open_world, manifest.novel_classes, manifest.novel_names) == (True, 100 - known, names)
    assert [label for _, label in manifest.labelled] == list(range(known))
    assert manifest.truth == [*range(known), *(number for number in range(known, 100) for _ in range(2))]
    assert [path.parent.name for path in manifest.unlabelled] == [names[number] for number in manifest.truth]
    assert not {path for path, _ in manifest.labelled} & set(manifest.unlabelled)
    assert [label for _, label in manifest.novel_test] == list(range(known, 100))
    assert "--recipe open-world" in manifest.notes[-1]
