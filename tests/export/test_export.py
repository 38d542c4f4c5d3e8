"""What is exported, that it answers like torch, and that nothing is lost when it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from ncd_export import export as exporter
from ncd_export.graph import ExportGraph
from ncd_export.repository import add_to_repository, render_config
from ncd_export.to_onnx import write_onnx
from ncd_export.verify import verify
from ncd_training.config import ModelConfig
from ncd_training.dual_branch import DualBranchModel
from ncd_training.run_dir import RunDir
from ncd_training.setup import prepare
from ncd_training.trunk import TRUNKS, build_trunk
from rich.console import Console

from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError, ExportMismatchError
from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.runners import open_session

QUIET = Console(quiet=True)
CHECKED_IN = Path(__file__).parents[2] / "model_repository" / "ncd_global"
OUTPUTS = ["cluster_id", "confidence", "probabilities", "embedding"]


@pytest.mark.parametrize("name", TRUNKS)
def test_every_trunk_exports_and_answers_like_torch(name: str, glyphs: Path, tmp_path: Path) -> None:
    resolution = 64 if name in {"resnet18", "resnet50", "efficientnet_lite0", "vit_small"} else 32
    torch.manual_seed(0)
    parts = build_trunk(name, resolution=resolution)
    model = DualBranchModel(parts, known=5, novel=7).eval()
    graph = ExportGraph(model)
    write_onnx(graph, tmp_path / "model.onnx", resolution=resolution, metadata={"origin": "test"})
    spec = PreprocessSpec(resolution=resolution, resize=resolution)
    images = np.stack([load_array(path, spec) for path in sorted((glyphs / "test").rglob("*.png"))[:9]])
    session = open_session(tmp_path / "model.onnx")
    for batch in (images[:1], images):
        answer = dict(zip(OUTPUTS, session.run(OUTPUTS, {"image": batch}), strict=True))
        with torch.inference_mode():
            expected = graph(torch.from_numpy(batch))
        assert np.array_equal(answer["cluster_id"], expected.cluster_id)
        np.testing.assert_allclose(answer["probabilities"], expected.probabilities, atol=1e-4)
        np.testing.assert_allclose(answer["embedding"], expected.embedding, rtol=1e-4, atol=1e-4)
    assert stored_bytes(tmp_path / "model.onnx") <= 1.02 * sum(p.numel() * 4 for p in graph.parameters())


@pytest.mark.parametrize("heads", ["joint", "open_world"])
def test_a_head_over_known_and_novel_classes_is_served_too(heads: Any, glyphs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = build_trunk("small_resnet", resolution=32)
    model = DualBranchModel(parts, known=5, novel=7, model=ModelConfig(heads=heads)).eval()
    graph = ExportGraph(model)
    write_onnx(graph, tmp_path / "model.onnx", resolution=32, metadata={"origin": "test"})
    paths = sorted((glyphs / "test").rglob("*.png"))[:9]
    assert verify(graph, tmp_path / "model.onnx", paths, PreprocessSpec(resolution=32, resize=32), max_batch=8).passed
    images = np.stack([load_array(path, PreprocessSpec(resolution=32, resize=32)) for path in paths])
    names = ["class_id", "is_novel", "cluster_id", "probabilities"]
    class_id, is_novel, cluster_id, probabilities = open_session(tmp_path / "model.onnx").run(names, {"image": images})
    assert class_id.dtype == np.int64 and is_novel.dtype == np.bool_
    np.testing.assert_array_equal(is_novel, class_id >= 5)
    assert probabilities.shape == (9, 12 if heads == "open_world" else 7)
    if heads == "open_world":
        np.testing.assert_array_equal(class_id, cluster_id)


def stored_bytes(path: Path) -> int:
    return sum(int(np.prod(tensor.dims)) * 4 for tensor in onnx.load(path).graph.initializer)


def test_only_the_served_part_is_in_the_file(bundle: Path) -> None:
    model = onnx.load(bundle / "model.onnx")
    names = " ".join(tensor.name for tensor in model.graph.initializer)
    assert "cluster_head" in names
    for stripped in ("known_head", "branches.1", "bank", "dictionar", "queue"):
        assert stripped not in names
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts["bundle_id"] == Bundle.read(bundle).manifest.bundle_id
    assert not [node for node in model.graph.node if node.op_type == "BatchNormalization"]


def test_the_bundle_says_what_was_compared(bundle: Path) -> None:
    verification = json.loads((bundle / "verification.json").read_text())
    assert verification["passed"] and verification["equal_ids"] == 1.0
    assert verification["batch_sizes"] == [1, 2, 7, 64]
    card = (bundle / "MODEL_CARD.md").read_text()
    assert "unlabelled-train" in card and "k-means on supervised features" in card
    assert "- initial weights: self-supervised by rotation" in card


def test_a_mismatch_leaves_the_old_bundle_and_repository(
    tiny_run: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    before = {path.name: path.read_bytes() for path in old.iterdir()}

    def spoiled(graph: ExportGraph, *arguments: Any, **keywords: Any) -> None:
        write_onnx(graph, *arguments, **keywords)
        with torch.no_grad():  # the file holds other weights than the model that it is compared with
            graph.cluster_head.weight.mul_(-1)

    monkeypatch.setattr(exporter, "write_onnx", spoiled)
    run = RunDir.open(tiny_run)
    setup = prepare(run.config(), QUIET)
    with pytest.raises(ExportMismatchError, match="differs from the trained one"):
        exporter.export_run(setup, run, out=old, repository=tmp_path / "repository", name="m")
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_exporting_again_adds_a_version(bundle: Path, tmp_path: Path) -> None:
    loaded = Bundle.read(bundle)
    folders = [add_to_repository(loaded, tmp_path, name="birds") for _ in range(2)]
    assert [folder.name for folder in folders] == ["1", "2"]
    assert sorted(path.name for path in (tmp_path / "birds").iterdir()) == ["1", "2", "config.pbtxt", "labels.txt"]


def test_a_model_of_somebody_else_is_left_alone(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(DataError, match="was not made by ncd-serve"):
        add_to_repository(Bundle.read(bundle), tmp_path, name="birds")
    assert (tmp_path / "birds" / "config.pbtxt").read_text() == 'backend: "python"'


def test_the_checked_in_configuration_is_the_generated_one(bundle: Path) -> None:
    """model_repository/ in git shows what an export of the embedded model writes, but for its id."""
    loaded = Bundle.read(bundle)
    config = render_config(loaded, name="ncd_global", cores=2).replace(loaded.manifest.bundle_id, "BUNDLE_ID")
    assert (CHECKED_IN / "config.pbtxt").read_text() == config
    assert (CHECKED_IN / "labels.txt").read_text() == (bundle / "labels.txt").read_text()
