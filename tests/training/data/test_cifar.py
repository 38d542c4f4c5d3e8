"""CIFAR from tiny archives in both official layouts, and pickles that want more than to rebuild arrays."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from ncd_training.config.schema import DataConfig
from ncd_training.data.datasets import cifar, load_manifest
from ncd_training.data.datasets.archives import load_split
from ncd_training.data.manifest import Manifest
from PIL import Image

from ncd_serve.errors import DataError


def load(name: str, root: Path) -> Manifest:
    return load_manifest(DataConfig(dataset=name, root=root))


def sizes(manifest: Manifest) -> list[int]:
    return [len(part) for part in (manifest.labelled, manifest.unlabelled, manifest.known_test, manifest.novel_test)]


def pictures(classes: int, copies: int, seed: int) -> tuple[np.ndarray, list[int]]:
    pixels = np.random.default_rng(seed).integers(0, 256, (classes * copies, 3072), dtype=np.uint8)
    return pixels, [number % classes for number in range(classes * copies)]


def make_cifar_python(root: Path, name: str) -> list[np.ndarray]:
    """Two training images and one test image of each class; their pixels, [n, 3072] in archive order."""
    classes = load_split(name).classes
    ten = name == "cifar10"
    folder = root / ("cifar-10-batches-py" if ten else "cifar-100-python")
    folder.mkdir()
    labels_key, names_key = ("labels", "label_names") if ten else ("fine_labels", "fine_label_names")
    (folder / ("batches.meta" if ten else "meta")).write_bytes(pickle.dumps({names_key: list(classes)}))
    train, test = pictures(len(classes), 2, 0), pictures(len(classes), 1, 1)
    files = [f"data_batch_{number}" for number in range(1, 6)] if ten else ["train"]
    for number, file in enumerate(files):
        batch = {"data": train[0][number :: len(files)], labels_key: train[1][number :: len(files)]}
        (folder / file).write_bytes(pickle.dumps(batch))
    batch = {"data": test[0], labels_key: test[1]}
    (folder / ("test_batch" if ten else "test")).write_bytes(pickle.dumps(batch))
    return [np.concatenate([train[0][number :: len(files)] for number in range(len(files))]), test[0]]


def make_cifar_binary(root: Path, name: str) -> None:
    classes = load_split(name).classes
    ten = name == "cifar10"
    folder = root / ("cifar-10-batches-bin" if ten else "cifar-100-binary")
    folder.mkdir()
    (folder / ("batches.meta.txt" if ten else "fine_label_names.txt")).write_text("\n".join(classes) + "\n\n")
    coarse = b"" if ten else b"\x63"
    files = [f"data_batch_{number}.bin" for number in range(1, 6)] if ten else ["train.bin"]
    for file, copies in [*((file, 2) for file in files), ("test_batch.bin" if ten else "test.bin", 1)]:
        rows = zip(*pictures(len(classes), copies, 0), strict=True)
        (folder / file).write_bytes(b"".join(coarse + bytes([label]) + row.tobytes() for row, label in rows))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_becomes_png_files_once(name: str, tmp_path: Path) -> None:
    train, test = make_cifar_python(tmp_path, name)
    split = load_split(name)
    manifest = load(name, tmp_path)
    known, novel = len(split.known), len(split.novel)
    assert sizes(manifest) == [2 * known, 2 * novel, known, novel]
    assert (manifest.known_classes, manifest.novel_names) == (list(split.known), split.novel)
    assert [label for _, label in manifest.labelled] == [number for number in range(known) for _ in range(2)]
    assert manifest.truth == [number for number in range(novel) for _ in range(2)]
    path = manifest.labelled[0][0]
    assert path.parent == tmp_path / f"{name}-png" / "train" / split.known[0]
    expected = train[int(path.stem)].reshape(3, 32, 32).transpose(1, 2, 0)
    assert np.array_equal(np.asarray(Image.open(path)), expected)
    held_out = manifest.novel_test[-1][0]
    assert np.array_equal(np.asarray(Image.open(held_out))[..., 0].ravel(), test[int(held_out.stem)][:1024])
    before = path.stat().st_mtime_ns
    assert load(name, tmp_path).labelled[0][0].stat().st_mtime_ns == before
    assert f"labelled {len(manifest.labelled)} instead of" in manifest.notes[-1]


@pytest.mark.parametrize(("name", "train"), [("cifar10", 10), ("cifar100", 2)])
def test_cifar_from_its_binary_archive(name: str, train: int, tmp_path: Path) -> None:
    make_cifar_binary(tmp_path, name)
    known, novel = len(load_split(name).known), len(load_split(name).novel)
    manifest = load(name, tmp_path)
    assert sizes(manifest) == [train * known, train * novel, known, novel]
    assert manifest.novel_test[0][0].parent.name == load_split(name).novel[0]


def python2_batch(pixels: bytes) -> bytes:
    """What Python 2 wrote for `{"data": <one row>, "labels": [3]}`: protocol 2, text and bytes alike as strings."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x01M" + struct.pack("<H", len(pixels)) + b"\x86" + dtype + b"\x89"
    state += b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    return b"\x80\x02}(U\x04data" + array + state + b"U\x06labels](K\x03eu."


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    pixels = bytes(range(256)) * 12
    (tmp_path / "batch").write_bytes(python2_batch(pixels))
    batch = cifar.load_pickle(tmp_path / "batch")
    assert batch["labels"] == [3]
    assert (batch["data"].shape, batch["data"].tobytes()) == ((1, 3072), pixels)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Evil()), r"calls posix\.mkdir"),
        (b"cnumpy.testing\nrundocs\n.", r"calls numpy\.testing\.rundocs"),
        (b"cbuiltins\neval\n(V1+1\ntR.", r"calls builtins\.eval"),
        (pickle.dumps({"data": 1})[:-4], "data_batch_1"),
        (b"", "data_batch_1"),
        (pickle.dumps([1, 2]), "has no 'data'"),
        (pickle.dumps({"data": np.zeros((1, 3), np.uint8), "labels": [0]}), "does not hold CIFAR's images"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}), "does not hold CIFAR's images"),
    ],
)
def test_a_malicious_or_broken_cifar_batch_is_refused(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_cifar_python(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("cifar10", tmp_path)
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "cifar10-png").exists(), "nothing half-written is left"


def test_a_binary_batch_cut_short(tmp_path: Path) -> None:
    make_cifar_binary(tmp_path, "cifar10")
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3.bin is cut short"):
        load("cifar10", tmp_path)
