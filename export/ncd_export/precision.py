"""The model in fewer bits: fp16 for GPUs, int8 for CPUs. What follows the embedding is small and stays in fp32."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import onnx
import onnx.utils
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

Precision = Literal["fp32", "fp16", "int8"]


def to_fp16(source: Path, target: Path) -> None:
    """Write the model with weights and activations of half precision; its inputs and outputs stay what they are."""
    model = onnx.load(source)
    heads = _heads(model.graph)
    trunk = onnx.utils.Extractor(model).extract_model(["image"], ["embedding"])
    with _quiet():
        # Cut off before, since nodes that the converter is told to leave alone still hand on half precision.
        reduced = convert_float_to_float16(trunk, keep_io_types=True)
    wanted = {name for node in heads for name in node.input} - {tensor.name for tensor in reduced.graph.initializer}
    reduced.graph.node.extend(heads)
    reduced.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in wanted)
    reduced.graph.ClearField("output")
    reduced.graph.output.extend(model.graph.output)
    _save(reduced, target, like=model)


def to_int8(source: Path, target: Path, batches: Iterable[NDArray[np.uint8]]) -> None:
    """Write the model with weights and activations of 8 bits, whose ranges are those on the given images."""
    fp32 = onnx.load(source)
    with _quiet():
        quantize_static(
            fp32,
            target,
            _Calibration(batches),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            # 7 bits for weights: sums of two products overflow 16 bits otherwise on x86 without VNNI.
            reduce_range=True,
            nodes_to_exclude=[node.name for node in _heads(fp32.graph)],
        )
    _save(onnx.load(target), target, like=fp32)


def _save(model: onnx.ModelProto, target: Path, *, like: onnx.ModelProto) -> None:
    """Write a model that was made from another, with the facts about its origin."""
    onnx.helper.set_model_props(model, {entry.key: entry.value for entry in like.metadata_props})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, target)


class _Calibration(CalibrationDataReader):  # type: ignore[misc]  # untyped
    """Batches of images as the quantiser asks for them."""

    def __init__(self, batches: Iterable[NDArray[np.uint8]]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        """The next batch, or None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {"image": batch}


def _heads(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that the embedding does not need."""
    needed, nodes = {"embedding"}, []
    for node in reversed(graph.node):  # which are in the order of their execution
        if needed.intersection(node.output):
            needed.update(node.input)
        else:
            nodes.append(node)
    return nodes[::-1]


@contextmanager
def _quiet() -> Iterator[None]:
    """The converters recommend steps that the exporter has taken already, and warn of every tiny weight."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
