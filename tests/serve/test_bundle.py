import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError, UsageError
from ncd_serve.runners import OnnxRunner


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def test_a_bundle_reads_and_answers(bundle: Path) -> None:
    runner = OnnxRunner(Bundle.read(bundle))
    answer, fits = runner.answer(np.zeros((3, 32, 32, 3), np.uint8))
    assert answer.shape == (3, len(runner.cluster_names))
    assert answer.sum(axis=1) == pytest.approx(1)
    assert fits is not None and fits.shape == (3,) and set(fits) <= {0, 1, 2}


def test_a_path_as_text_and_a_device_by_name_do_as_well(bundle: Path) -> None:
    assert Bundle.read(str(bundle)) == Bundle.read(bundle)
    image = np.zeros((1, 32, 32, 3), np.uint8)
    by_name, by_bundle = OnnxRunner(str(bundle), device="cpu"), OnnxRunner(Bundle.read(bundle))
    assert (by_name.answer(image).probabilities == by_bundle.answer(image).probabilities).all()
    with pytest.raises(UsageError, match="'gpu' is not a device") as refused:
        OnnxRunner(bundle, device="gpu")
    assert "cpu" in str(refused.value.hint)


@pytest.mark.parametrize("name", ["model.onnx", "labels.txt", "verification.json", "MODEL_CARD.md", "reference.npz"])
def test_a_changed_or_missing_file_is_refused(copy: Path, name: str) -> None:
    (copy / name).write_bytes((copy / name).read_bytes() + b" ")
    with pytest.raises(DataError, match=name):
        Bundle.read(copy)
    (copy / name).unlink()
    with pytest.raises(DataError, match=name):
        Bundle.read(copy)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 99, "surprise": 1}, "has schema 99"),
        ({"schema_version": None}, "damaged: schema_version"),
        ({"cluster_names": "one"}, "damaged: cluster_names"),
        ({"surprise": 1}, "damaged: surprise"),
    ],
)
def test_newer_or_damaged_descriptions_are_refused(copy: Path, change: dict[str, object], reason: str) -> None:
    path = copy / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=reason):
        Bundle.read(copy)


def test_a_file_without_a_hash_is_not_trusted(copy: Path) -> None:
    path = copy / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": {}}))
    with pytest.raises(DataError, match=r"model\.onnx is missing or not the file that was verified"):
        Bundle.read(copy)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a bundle"):
        Bundle.read(tmp_path)
