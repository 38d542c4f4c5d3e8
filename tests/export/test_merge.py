"""Merged clusters inside the ONNX file: hand-worked sums, every kind of head and precision, and the way back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from ncd_export.graph import ExportGraph
from ncd_export.merge import set_merges
from ncd_export.precision import to_fp16, to_int8
from ncd_training.config.resolve import resolve_config
from ncd_training.model.onnx import write_onnx
from ncd_training.model.weights import initial_trunk
from ncd_training.run.step import build_state
from onnx import TensorProto, helper

from ncd_serve.fit import FitLimits
from ncd_serve.runners import open_session
from tests.runs import ready

Answer = dict[str, np.ndarray]
HEADS = {"separate": "linear", "joint": "linear", "open_world": "cosine"}
KNOWN = 21


def ask(model: onnx.ModelProto, images: np.ndarray, folder: Path) -> Answer:
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "asked.onnx")
    names = [output.name for output in model.graph.output]
    return dict(zip(names, open_session(folder / "asked.onnx").run(names, {"image": images}), strict=True))


def by_hand(*, classes: bool) -> onnx.ModelProto:
    """Probabilities are the input itself, of four clusters or of one known class and three clusters."""
    nodes = [
        helper.make_node("Log", ["image"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["cluster_id"], axis=1, keepdims=0),
        helper.make_node("ReduceMax", ["probabilities", "axis"], ["confidence"], keepdims=0),
        helper.make_node("Identity", ["cluster_id"], ["fit"]),  # stands for what is judged before a merge
    ]
    kinds = {"cluster_id": TensorProto.INT64, "confidence": TensorProto.FLOAT, "fit": TensorProto.INT64}
    outputs = [helper.make_tensor_value_info(name, kind, ["N"]) for name, kind in kinds.items()]
    outputs.append(helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 3 if classes else 4]))
    constants = {"axis": np.array([1]), "known": np.array(1)}
    if classes:
        nodes[1:2] = [
            helper.make_node("Slice", ["logits", "axis", "end", "axis"], ["cluster_logits"]),
            helper.make_node("Softmax", ["cluster_logits"], ["probabilities"], axis=1),
            helper.make_node("ArgMax", ["logits"], ["class_id"], axis=1, keepdims=0),
            helper.make_node("GreaterOrEqual", ["class_id", "known"], ["is_novel"]),
        ]
        constants["end"] = np.array([4])
        outputs.append(helper.make_tensor_value_info("class_id", TensorProto.INT64, ["N"]))
        outputs.append(helper.make_tensor_value_info("is_novel", TensorProto.BOOL, ["N"]))
    stored = [onnx.numpy_helper.from_array(values, name) for name, values in constants.items()]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 4])
    graph = helper.make_graph(nodes, "graph", [image], outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_probabilities_are_added_and_decide_anew(tmp_path: Path) -> None:
    model = by_hand(classes=False)
    images = np.array([[0.4, 0.25, 0.3, 0.05], [0.6, 0.1, 0.1, 0.2]], np.float32)
    set_merges(model.graph, {2: 1, 3: 1}, known=0)
    answer = ask(model, images, tmp_path)
    np.testing.assert_allclose(answer["probabilities"], [[0.4, 0.6, 0, 0], [0.6, 0.4, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(answer["confidence"], [0.6, 0.6], atol=1e-6)
    assert answer["cluster_id"].tolist() == [1, 0]
    assert answer["fit"].tolist() == [0, 0], "what the graph judges, it judges in the cluster before the merge"


def test_a_joint_head_adds_up_its_own_probabilities(tmp_path: Path) -> None:
    model = by_hand(classes=True)
    # The known class leads, until two of the three clusters are one.
    images = np.array([[0.4, 0.3, 0.05, 0.25], [0.6, 0.2, 0.1, 0.1]], np.float32)
    before = ask(model, images, tmp_path)
    assert before["class_id"].tolist() == [0, 0] and not before["is_novel"].any()
    set_merges(model.graph, {2: 0}, known=1)
    answer = ask(model, images, tmp_path)
    assert answer["class_id"].tolist() == [1, 0] and answer["is_novel"].tolist() == [True, False]
    np.testing.assert_allclose(answer["probabilities"][0], [0.55 / 0.6, 0.05 / 0.6, 0], atol=1e-6)


@pytest.fixture(scope="module", params=HEADS)
def exported(request: pytest.FixtureRequest, glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real export of an untrained model, one for each kind of head."""
    heads, form = request.param, HEADS[request.param]
    overrides = {"data.root": str(glyphs), "model.heads": heads, "model.head_form": form}
    setup = ready(resolve_config(recipes=["glyphs"], overrides=overrides))
    state = build_state(setup, initial_trunk(setup.config, weights=None)[0])
    with torch.no_grad():  # so that images differ in their clusters
        state.model.branches[0].cluster_head.weight.mul_(50)
    rng, clusters = np.random.default_rng(0), setup.clusters + KNOWN * (heads == "open_world")
    centres = np.abs(rng.normal(size=(clusters, 512))).astype(np.float32)
    limits = FitLimits(centres, *np.linspace(0.1, 0.5, 3 * clusters, dtype=np.float32).reshape(3, clusters))
    path = tmp_path_factory.mktemp("merge") / f"{heads}.onnx"
    graph = ExportGraph(state.model, limits).cpu().eval()
    write_onnx(graph, path, resolution=32, metadata={"bundle_id": "0", "dataset": "glyphs"})
    return path


def expected(before: Answer, merged: dict[int, int]) -> Answer:
    probabilities = before["probabilities"].copy()
    for source, target in merged.items():
        probabilities[:, target] += probabilities[:, source]
        probabilities[:, source] = 0
    cluster_id = probabilities.argmax(axis=1)
    return {**before, "probabilities": probabilities, "cluster_id": cluster_id, "confidence": probabilities.max(axis=1)}


def class_ids(model: onnx.ModelProto, images: np.ndarray, merged: dict[int, int], folder: Path) -> np.ndarray:
    """A joint head's decision, worked out from its logits."""
    with_logits = onnx.ModelProto()
    with_logits.CopyFrom(model)
    (decision,) = (node for node in model.graph.node if "class_id" in node.output)
    with_logits.graph.output.append(helper.make_tensor_value_info(decision.input[0], TensorProto.FLOAT, ["batch", 26]))
    odds = np.exp(ask(with_logits, images, folder)[decision.input[0]].astype(np.float64))
    for source, target in merged.items():
        odds[:, KNOWN + target] += odds[:, KNOWN + source]
        odds[:, KNOWN + source] = 0
    return odds.argmax(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_every_head_and_precision(precision: str, exported: Path, tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    images[::2] //= 4
    path = tmp_path / "reduced.onnx" if precision != "fp32" else exported
    if precision == "fp16":
        to_fp16(exported, path)
    if precision == "int8":
        to_int8(exported, path, [images])
    model = onnx.load(path)
    before, original = ask(model, images, tmp_path), model.SerializeToString(deterministic=True)
    sizes = np.bincount(before["cluster_id"], minlength=before["probabilities"].shape[1])
    rarest, *_, second, largest = sizes.argsort(kind="stable").tolist()
    merged = {largest: rarest, second: rarest}
    wanted = expected(before, merged)
    if exported.stem == "joint":
        wanted["class_id"] = class_ids(model, images, merged, tmp_path)
    if exported.stem == "open_world":
        wanted["class_id"] = wanted["cluster_id"]
    if exported.stem != "separate":
        wanted["is_novel"] = wanted["class_id"] >= KNOWN
    set_merges(model.graph, merged, known=KNOWN)
    after = ask(model, images, tmp_path)
    assert (after["cluster_id"] != before["cluster_id"]).any()
    assert not np.isin(after["cluster_id"], list(merged)).any()
    for name, values in wanted.items():
        assert after[name].dtype == before[name].dtype
        np.testing.assert_allclose(after[name], values, atol=1e-6, err_msg=name)
    applied = model.SerializeToString(deterministic=True)
    for other in ({0: 1}, merged):
        set_merges(model.graph, other, known=KNOWN)
    assert model.SerializeToString(deterministic=True) == applied, "merges replace each other"
    set_merges(model.graph, {}, known=KNOWN)
    assert model.SerializeToString(deterministic=True) == original
