import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ncd_export.rename import rename_bundle
from PIL import Image

from ncd_serve.bundle import Bundle
from ncd_serve.deploy.sizing import measure_costs
from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import sha256
from ncd_serve.naming import Names
from ncd_serve.onnx_file import check_self_contained
from ncd_serve.runners import OnnxRunner
from tests.conftest import Ncd


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def test_a_bundle_reads_and_answers(bundle: Path) -> None:
    runner = OnnxRunner(Bundle.read(bundle))
    answer, novel, fits, outside, known = runner.answer(np.zeros((3, 32, 32, 3), np.uint8))
    assert answer.shape == (3, len(runner.cluster_names))
    assert answer.sum(axis=1) == pytest.approx(1)
    assert novel is None, "a model of novel classes alone does not tell"
    assert fits is not None and fits.shape == (3,) and set(fits) <= {0, 1, 2}
    for chances in (outside, known):
        assert chances is not None and chances.shape == (3,) and ((chances >= 0) & (chances <= 1)).all()


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


def rewritten(folder: Path, **changes: object) -> Path:
    """The bundle with another description, and with hashes of its files as they are."""
    path = folder / "bundle.json"
    content = {**json.loads(path.read_text()), **changes}
    content["sha256"] = {name: sha256(folder / name) for name in content["sha256"]}
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"merged": {"99": 0}}, "cluster 99 is none of its 5"),
        ({"junk": [-1]}, "cluster -1 is none of its 5"),
        ({"cluster_names": ["a\nb", "c", "d", "e", "f"]}, "cannot hold line breaks"),
        ({"open_world": True}, "more known classes than clusters"),
        ({"sha256": {"../../etc/passwd": "0"}}, "damaged: sha256"),
        ({"preprocess": {"resolution": 0, "resize": 1}}, "damaged: preprocess.resolution"),
    ],
)
def test_descriptions_that_cannot_be_are_refused(copy: Path, change: dict[str, object], reason: str) -> None:
    path = copy / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=reason):
        Bundle.read(copy)


def test_the_digest_covers_all_of_a_bundle(copy: Path, bundle: Path) -> None:
    digest = Bundle.read(bundle).digest
    assert digest == "sha256:" + sha256(bundle / "bundle.json")
    for given in (digest, digest.removeprefix("sha256:")):
        assert Bundle.read(copy, digest=given).manifest == Bundle.read(bundle).manifest
    (copy / "labels.txt").write_text("other\nnames\n")
    rewritten(copy)  # whoever can write the folder can make its hashes right
    assert Bundle.read(copy).digest != digest
    with pytest.raises(DataError, match="has the digest sha256:") as refused:
        Bundle.read(copy, digest=digest)
    assert "another bundle" in str(refused.value.hint)


def test_a_digest_is_checked_where_a_bundle_is_used(copy: Path, glyphs: Path, ncd: Ncd) -> None:
    image, digest = next(glyphs.rglob("*.png")), Bundle.read(copy).digest
    good = ncd("assign", image, "--bundle", copy, "--digest", digest)
    assert good.returncode == 0, good.stderr
    bad = ncd("assign", image, "--bundle", copy, "--digest", "0" * 64)
    assert bad.returncode == 3 and f"has the digest {digest}, not 000" in bad.stderr and "hint:" in bad.stderr
    deployed = ncd("deploy", "render", "compose", "--bundle", copy, "--out", copy / "x", "--digest", "0" * 64)
    assert deployed.returncode == 3 and "has the digest" in deployed.stderr


def test_a_reference_of_other_clusters_is_refused(copy: Path) -> None:
    opened = Bundle.read(rewritten(copy, cluster_names=["a", "b"]))
    with pytest.raises(DataError, match="is of 5 clusters, not 2"):
        opened.reference()
    Image.new("RGB", (40, 40)).save(copy / "sample.png")
    with pytest.raises(DataError, match="is not the model of its bundle"):
        measure_costs(opened, [copy / "sample.png"])


def test_a_card_that_is_no_text_does_not_end_a_renaming(copy: Path, tmp_path: Path) -> None:
    (copy / "MODEL_CARD.md").write_bytes(b"\xff")
    names = Names.model_validate({"clusters": {0: {"name": "gull"}}})
    renamed, _ = rename_bundle(rewritten(copy), names, repository=tmp_path / "models", name="m")
    assert renamed.manifest.cluster_names[0] == "gull"


def test_a_tensor_that_says_that_it_is_in_this_file_is(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [1.0])
    tensor.data_location = onnx.TensorProto.DEFAULT  # onnx writes it after it has loaded tensors from other files
    graph = onnx.helper.make_graph([], "g", [], [], [tensor])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    check_self_contained(tmp_path / "model.onnx")
