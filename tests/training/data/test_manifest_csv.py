from pathlib import Path

import pytest
from ncd_training.config.schema import DataConfig
from ncd_training.data.datasets import load_manifest
from ncd_training.data.manifest import Manifest

from ncd_serve.errors import DataError

ROWS = """path,label,split,true_label
a/1.png,cat,train,
a/2.png,cat,,
b/1.png,ant,,
b/2.png,ant,train,ant
pile/1.png,,,zebra
"pile/2, left.png",,train,yak
test/1.png,cat,test,
test/2.png,,test,yak
"""


def read(text: str, folder: Path, encoding: str = "utf-8") -> Manifest:
    file = folder / "own.csv"
    file.write_text(text, encoding=encoding)
    return load_manifest(DataConfig(manifest=file))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_rows_become_a_manifest(encoding: str, tmp_path: Path) -> None:
    manifest = read(ROWS, tmp_path, encoding)
    assert manifest.name == "own"
    assert manifest.known_classes == ["ant", "cat"]
    assert manifest.labelled == [
        (tmp_path / f"{name}.png", label) for name, label in (("a/1", 1), ("a/2", 1), ("b/1", 0), ("b/2", 0))
    ]
    assert manifest.unlabelled == [tmp_path / "pile" / "1.png", tmp_path / "pile" / "2, left.png"]
    assert (manifest.truth, manifest.novel_names) == ([1, 0], ("yak", "zebra"))
    assert manifest.known_test == ((tmp_path / "test" / "1.png", 1),)
    assert manifest.novel_test == ((tmp_path / "test" / "2.png", 0),)
    assert manifest.novel_classes is None, "true classes are for reports: the user says how many clusters"


def test_without_true_labels_there_is_no_truth(tmp_path: Path) -> None:
    manifest = read("label,path\ncat,1.png\n,2.png\n", tmp_path)
    assert (manifest.truth, manifest.novel_names) == (None, ())


def test_absolute_paths_stay(tmp_path: Path) -> None:
    manifest = read(f"path,label\n{tmp_path}/x/1.png,cat\n2.png,\n", tmp_path)
    assert manifest.labelled[0][0] == tmp_path / "x" / "1.png"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'path'"),
        ("path,split\n1.png,train\n", "has no column 'label'"),
        ("path,label,true_lable\n1.png,cat,\n", "unknown column 'true_lable'"),
        ("path,label\n1.png,cat\n,cat\n", "line 3 has no path"),
        ("path,label,split\n1.png,cat,valid\n", "line 2: unknown split 'valid'"),
        ("path,label\n1.png,cat,train\n", "line 2 has more cells than columns"),
        ("path,label,true_label\n1.png,cat,dog\n", "line 2 has two labels"),
        ("path,label,true_label\n1.png,cat,\n2.png,,a\n3.png,,\n", "line 4 has no true_label"),
        ("path,label,split\n1.png,cat,\n2.png,,\n3.png,dog,test\n", "line 4: no training image has the class 'dog'"),
        ("path,label,split\n1.png,cat,\n2.png,,\n3.png,,test\n", "line 4: no training image has the class ''"),
        ("path,label\n1.png,cat\n", "1 labelled and 0 unlabelled"),
        ('path,label\n1.png,"cat\n', "0 unlabelled"),
        ("path,label\n1.png," + "x" * 200_000 + "\n", "line 2: field larger than field limit"),
    ],
)
def test_mistakes_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(text, tmp_path)
    assert caught.value.hint


def test_a_file_that_is_no_csv(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        load_manifest(DataConfig(manifest=tmp_path / "none.csv"))
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        load_manifest(DataConfig(manifest=tmp_path / "x.csv"))
