from pathlib import Path

import pytest
from ncd_training.config import DataConfig
from ncd_training.datasets import load_manifest
from ncd_training.manifest import Manifest
from PIL import Image

from ncd_serve.errors import DataError, UsageError

REAL_CUB = Path(__file__).parents[3] / "shared" / "data" / "CUB_200_2011"


def make_cub(root: Path, classes: int = 200) -> Path:
    """The official layout with two training and one test image of each class; the paths are all there is of images."""
    lines: dict[str, list[str]] = {name: [] for name in ("images", "image_class_labels", "train_test_split", "classes")}
    for label in range(1, classes + 1):
        lines["classes"].append(f"{label} {label:03d}.Bird_{label}")
        for copy in range(3):
            number = len(lines["images"]) + 1
            lines["images"].append(f"{number} {label:03d}.Bird_{label}/{copy}.jpg")
            lines["image_class_labels"].append(f"{number} {label}")
            lines["train_test_split"].append(f"{number} {int(copy < 2)}")
    root.mkdir()
    for name, rows in lines.items():
        (root / f"{name}.txt").write_text("\n".join(rows) + "\n")
    return root


def test_cub_splits_by_class_number(tmp_path: Path) -> None:
    root = make_cub(tmp_path / "CUB_200_2011")
    manifest = load_manifest(DataConfig(dataset="cub200", root=root))
    assert (len(manifest.labelled), len(manifest.unlabelled), manifest.novel_classes) == (320, 80, 40)
    assert (len(manifest.known_test), len(manifest.novel_test)) == (160, 40)
    assert manifest.known_classes[-1] == "160.Bird_160"
    assert manifest.unlabelled[0] == root / "images" / "161.Bird_161" / "0.jpg"
    assert manifest.truth == [number for number in range(40) for _ in range(2)]


@pytest.mark.skipif(not REAL_CUB.is_dir(), reason="the real images are not beside this clone")
def test_real_cub_has_the_published_numbers() -> None:
    manifest = load_manifest(DataConfig(dataset="cub200", root=REAL_CUB))
    assert (len(manifest.labelled), len(manifest.unlabelled)) == (4796, 1198)
    assert all(path.is_file() for path in manifest.images)


def test_glyphs_are_drawn_once_and_the_same_for_a_seed(tmp_path: Path) -> None:
    from ncd_training.glyphs import write_glyphs

    first, second, other = (
        write_glyphs(tmp_path / name, train=1, test=1, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    pictures = [{p.relative_to(root): p.read_bytes() for p in root.rglob("*.png")} for root in (first, second, other)]
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.parametrize(
    ("data", "kind", "hint"),
    [
        ({"dataset": "cub20"}, UsageError, "did you mean 'cub200'?"),
        ({"dataset": "cub200", "root": "nowhere"}, DataError, "official archive"),
        ({}, UsageError, "--dataset"),
        ({"labelled": "nowhere", "unlabelled": "nowhere"}, DataError, "check the path"),
    ],
)
def test_what_is_missing_is_said(data: dict[str, str], kind: type[Exception], hint: str) -> None:
    with pytest.raises(kind) as caught:
        load_manifest(DataConfig.model_validate(data))
    assert hint in caught.value.hint  # type: ignore[attr-defined]


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
