"""Every network and every kind of head: a step of training, an export, and the same answers for image files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.distributed as dist
from ncd_export.export import export_run
from ncd_training.base.checkpoint import save_checkpoint
from ncd_training.base.distributed import Ranks
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import resolve_config
from ncd_training.data.prepare import Setup
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.weights import initial_trunk
from ncd_training.run.step import TrainState, build_state, train_step
from onnx import numpy_helper

from ncd_serve.preprocess import load_array
from ncd_serve.runners import open_session
from tests.runs import SILENT, ready

# One of each family, at a resolution that leaves maps larger than one pixel.
FAMILIES = {"small_resnet": 32, "cifar_resnet18": 32, "resnet18": 64, "efficientnet_lite0": 64, "test_vit": 160}
HEADS: dict[str, dict[str, Any]] = {
    "joint": {"model.heads": "joint"},
    "open world": {"model.heads": "open_world", "model.head_form": "cosine"},
    "centres": {"method.name": "dtc", "model.branches": "global", "model.head_form": "centres"},
}


def stepped(
    glyphs: Path, folder: Path, *, together: bool = False, **settings: Any
) -> tuple[Setup, RunDir, DualBranchModel]:
    """A run that has done one step on eight images, and its model."""
    sizes = {"model.bank_size": 64, "model.dictionary_size": 64, "optim.epochs": 1}
    overrides = {"data.root": str(glyphs), "model.weights": "none", **sizes}
    setup = ready(resolve_config(recipes=["glyphs"], overrides={**overrides, **settings}))
    run = RunDir.create(folder, setup.config)
    parts, _ = initial_trunk(setup.config, weights=None)
    state = build_state(setup, parts, Ranks(size=2) if together else None)
    state.ranks = Ranks()
    step(state, setup)
    state.epoch = 1
    save_checkpoint(state, run.checkpoint)
    return setup, run, state.model.eval()


def step(state: TrainState, setup: Setup) -> None:
    labelled, manifest = setup.manifest.labelled[:32:8], setup.manifest
    paths = [path for path, _ in labelled] + manifest.unlabelled[:20:5]
    first = torch.from_numpy(np.stack([load_array(path, setup.config.data.preprocess) for path in paths]))
    first = first.permute(0, 3, 1, 2)
    labels = torch.tensor([label for _, label in labelled])
    state.model.train()
    views = [first, first.flip(3)]
    train_step(state, views, labels, rows=torch.arange(4), ramp=1.0, generator=torch.Generator())


@torch.inference_mode()
def trained_answers(model: DualBranchModel, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and embedding by the modules that were trained, without the exported graph's own code."""
    output = model(model.to_maps(torch.from_numpy(images).permute(0, 3, 1, 2)))[0]
    return output.cluster_logits.softmax(dim=1).numpy(), output.embedding.numpy()


def stored_bytes(model: onnx.ModelProto) -> int:
    constants = [attribute.t for node in model.graph.node for attribute in node.attribute if attribute.HasField("t")]
    return sum(numpy_helper.to_array(tensor).nbytes for tensor in (*model.graph.initializer, *constants))


@pytest.mark.slow
@pytest.mark.parametrize(("trunk", "resolution"), FAMILIES.items())
def test_every_family_of_trunks_answers_like_torch(trunk: str, resolution: int, glyphs: Path, tmp_path: Path) -> None:
    sizes = {"data.resolution": resolution, "data.resize": resolution}
    setup, run, model = stepped(glyphs, tmp_path / "run", **sizes, **{"model.backbone": trunk})
    exported = export_run(
        setup, run, out=tmp_path / "bundle", repository=tmp_path / "repository", name="m", progress=SILENT
    )
    images = np.stack([load_array(path, setup.config.data.preprocess) for path in setup.manifest.unlabelled[:9]])
    probabilities, embedding = trained_answers(model, images)
    names = ["cluster_id", "confidence", "probabilities", "embedding"]
    session = open_session(exported.bundle.model_path)
    for batch in (1, 9):
        answer = dict(zip(names, session.run(names, {"image": images[:batch]}), strict=True))
        np.testing.assert_array_equal(answer["cluster_id"], probabilities[:batch].argmax(axis=1))
        np.testing.assert_allclose(answer["confidence"], probabilities[:batch].max(axis=1), atol=1e-4)
        np.testing.assert_allclose(answer["probabilities"], probabilities[:batch], atol=1e-4)
        np.testing.assert_allclose(answer["embedding"], embedding[:batch], rtol=1e-4, atol=1e-4)
    assert_stripped(onnx.load(exported.bundle.model_path), model)


def assert_stripped(graph: onnx.ModelProto, model: DualBranchModel) -> None:
    """Nothing but trunk, first tail and cluster head is in the file, and batch norm is in its convolutions."""
    names = " ".join(tensor.name for tensor in graph.graph.initializer)
    assert not [word for word in ("known_head", "branches", "bank", "dictionar", "queue") if word in names]
    assert not [node for node in graph.graph.node if node.op_type == "BatchNormalization"]
    branch = model.branches[0]
    served = [p for part in (model.trunk, branch.tail, branch.cluster_head) for p in part.parameters()]
    # beside the mixture of classes, whose nodes come after the network
    mixture = sum(
        numpy_helper.to_array(tensor).nbytes
        for tensor in graph.graph.initializer
        if tensor.name.startswith(("generation-", "outside/"))
    )
    assert stored_bytes(graph) - mixture <= 1.02 * sum(p.numel() * p.element_size() for p in served)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_every_kind_of_head_is_served(heads: str, glyphs: Path, tmp_path: Path) -> None:
    setup, run, model = stepped(glyphs, tmp_path / "run", **HEADS[heads])
    exported = export_run(
        setup, run, out=tmp_path / "bundle", repository=tmp_path / "repository", name="m", progress=SILENT
    )
    assert exported.verification.passed
    images = np.stack([load_array(path, setup.config.data.preprocess) for path in setup.manifest.unlabelled[:9]])
    session, (expected, _) = open_session(exported.bundle.model_path), trained_answers(model, images)
    (probabilities,) = session.run(["probabilities"], {"image": images})
    np.testing.assert_allclose(probabilities, expected, atol=1e-4)
    if heads == "centres":
        assert exported.bundle.manifest.method == "dtc"
        return
    names = ["class_id", "is_novel", "cluster_id"]
    class_id, is_novel, cluster_id = session.run(names, {"image": images})
    assert class_id.dtype == np.int64 and is_novel.dtype == np.bool_
    np.testing.assert_array_equal(is_novel, class_id >= 21)
    assert probabilities.shape == (9, 26 if heads == "open world" else 5)
    if heads == "open world":
        np.testing.assert_array_equal(class_id, cluster_id)
        assert exported.bundle.manifest.cluster_names[:2] == ["B", "C"]


@pytest.mark.slow
def test_what_several_processes_trained_is_exported_by_one(glyphs: Path, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        setup, run, model = stepped(glyphs, tmp_path / "run", together=True)
    finally:
        dist.destroy_process_group()
    exported = export_run(
        setup, run, out=tmp_path / "bundle", repository=tmp_path / "repository", name="m", progress=SILENT
    )
    images = np.stack([load_array(setup.manifest.unlabelled[0], setup.config.data.preprocess)])
    (answer,) = open_session(exported.bundle.model_path).run(["probabilities"], {"image": images})
    np.testing.assert_allclose(answer, trained_answers(model, images)[0], atol=1e-4)
