"""Tiny ONNX models in a repository, and what tests of a server need beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.grpc as grpc
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ncd_serve.bundle import MANIFEST, Bundle, BundleManifest
from ncd_serve.errors import NcdError
from ncd_serve.files import atomic_directory, write_text
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.triton import TritonServer, add_jpeg_model, find_triton

try:
    SOURCE, WHY_NOT = str(find_triton().source), ""
except NcdError as error:
    SOURCE, WHY_NOT = "", str(error)

needs_triton = pytest.mark.skipif(not SOURCE, reason=WHY_NOT)
needs_wheel = pytest.mark.skipif(SOURCE != "wheel", reason="about the Python backend of the wheel's server")

Array = NDArray[Any]
Direct = Callable[[Array], dict[str, Array]]

READY_SECONDS = 60
SHAPES = {"cluster_id": [], "confidence": [], "batch_size": [], "probabilities": [5], "embedding": [8]}
LABELS = ["finch", "wren: house", "owl", "gull", "crow"]
CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "image" data_type: TYPE_UINT8 dims: [ 4, 4, 3 ] } ]
output [
  { name: "cluster_id" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } },
  { name: "confidence" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } },
  { name: "batch_size" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } },
  { name: "probabilities" data_type: TYPE_FP32 dims: [ 5 ] label_filename: "labels.txt" },
  { name: "embedding" data_type: TYPE_FP32 dims: [ 8 ] }
]
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 100000 }
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""
# What makes it one that our clients can ask.
SPEC = '\nparameters { key: "ncd_preprocess" value { string_value: "{\\"resolution\\": 4, \\"resize\\": 4}" } }\n'


def save_model(
    folder: Path,
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[Any],
    constants: dict[str, Any],
    *,
    version: int = 1,
) -> None:
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with atomic_directory(folder / str(version)) as fresh:
        onnx.save(model, fresh / "model.onnx")


def make_classifier(folder: Path, config: str = CONFIG, *, version: int = 1, labels: list[str] = LABELS) -> None:
    """The tensors of an exported model, on images of 4 x 4 pixels, and the number of images it was run on."""
    rng = np.random.default_rng(version)
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["pixels"], ["flat"]),
        helper.make_node("Div", ["flat", "white"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "trunk"], ["embedding"]),
        helper.make_node("MatMul", ["embedding", "head"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["cluster_id"], axis=1, keepdims=0),
        helper.make_node("ReduceMax", ["probabilities", "axes"], ["confidence"], keepdims=0),
        helper.make_node("Shape", ["image"], ["count"], start=0, end=1),
        helper.make_node("Expand", ["count", "count"], ["batch_size"]),
    ]
    constants = {
        "white": np.float32(255),
        "trunk": rng.normal(size=(48, 8)).astype(np.float32),
        "head": rng.normal(size=(8, 5)).astype(np.float32),
        "axes": np.array([1]),
    }
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", 4, 4, 3])
    types = {"cluster_id": TensorProto.INT64, "batch_size": TensorProto.INT64}
    outputs = [
        helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), ["N", *dims])
        for name, dims in SHAPES.items()
    ]
    save_model(folder, nodes, [image], outputs, constants, version=version)
    write_text(folder / "labels.txt", "\n".join(labels))
    write_text(folder / "config.pbtxt", config)


def make_lookup(folder: Path) -> None:
    """A model without config.pbtxt that fails at run time when asked for a row it does not have."""
    nodes = [helper.make_node("Gather", ["table", "row"], ["value"])]
    row = helper.make_tensor_value_info("row", TensorProto.INT64, ["N"])
    value = helper.make_tensor_value_info("value", TensorProto.FLOAT, ["N", 2])
    save_model(folder, nodes, [row], [value], {"table": np.arange(6, dtype=np.float32).reshape(3, 2)})


def make_slow(folder: Path) -> None:
    """A model whose answer takes as many matrix products as it is asked for."""
    size = 400
    state, kept = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("state", "product")
    )
    number = helper.make_tensor_value_info("number", TensorProto.INT64, [])
    go_on, still = (helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go_on", "still"))
    steps = [
        helper.make_node("MatMul", ["state", "matrix"], ["product"]),
        helper.make_node("Identity", ["go_on"], ["still"]),
    ]
    body = helper.make_graph(steps, "body", [number, go_on, state], [still, kept])
    nodes = [
        helper.make_node("Squeeze", ["steps"], ["count"]),
        helper.make_node("Loop", ["count", "", "matrix"], ["end"], body=body),
        helper.make_node("ReduceSum", ["end"], ["sum"], keepdims=0),
        helper.make_node("Unsqueeze", ["sum", "first"], ["total"]),
    ]
    asked = helper.make_tensor_value_info("steps", TensorProto.INT64, [1])
    total = helper.make_tensor_value_info("total", TensorProto.FLOAT, [1])
    constants = {"matrix": np.eye(size, dtype=np.float32), "first": np.array([0])}
    save_model(folder, nodes, [asked], [total], constants)
    (folder / "config.pbtxt").write_text(
        'backend: "onnxruntime" input [ { name: "steps" data_type: TYPE_INT64 dims: [ 1 ] } ]'
        ' output [ { name: "total" data_type: TYPE_FP32 dims: [ 1 ] } ] instance_group [ { kind: KIND_CPU count: 1 } ]'
    )


def make_export(repository: Path, *, version: int = 1, labels: list[str] = LABELS, config: str = CONFIG) -> None:
    """The classifier and the model that takes image files for it, in the order of a real export."""
    spec = PreprocessSpec(resolution=4, resize=4)
    facts = {"bundle_id": str(version), "created": "", "dataset": "", "method": "dual", "preprocess": spec}
    manifest = BundleManifest(**facts, known_classes=[], cluster_names=labels, training={}, versions={}, sha256={})
    folder = repository.parent / f"bundle-{version}"
    folder.mkdir()
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    add_jpeg_model(Bundle(folder, manifest), repository, name="birds", version=version)
    make_classifier(repository / "birds", config, version=version, labels=labels)


def directly(model: Path) -> Direct:
    """Answers of a classifier from ONNX Runtime in this process, with as many threads as the configuration says."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda images: dict(zip(SHAPES, session.run(list(SHAPES), {"image": images}), strict=True))


def random_images(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)


def tensor(name: str, array: Array) -> grpc.InferInput:
    result = grpc.InferInput(name, array.shape, {"uint8": "UINT8", "int64": "INT64"}[array.dtype.name])
    result.set_data_from_numpy(array)
    return result


def regions(pid: int | None = None) -> set[str]:
    """Shared memory of the servers that a process has started; other tests run beside this one."""
    return {path.name for path in Path("/dev/shm").glob(f"ncd-{pid or os.getpid()}-*")}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def stubs(server: TritonServer, model: str) -> list[int]:
    """The processes that serve a model."""
    children = [
        int(word) for file in Path(f"/proc/{server.pid}/task").glob("*/children") for word in file.read_text().split()
    ]
    return [pid for pid in children if f"/{model}/" in Path(f"/proc/{pid}/cmdline").read_text()]
