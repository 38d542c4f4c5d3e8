"""Precisions of an exported model: fp32 as trained, fp16 for GPUs, int8 for CPUs.

The few nodes after the embedding stay in fp32.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.utils
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16

from ncd_export.triton_config import Device
from ncd_serve.contract import Precision
from ncd_serve.errors import UsageError, did_you_mean

Batches = Iterable[NDArray[np.uint8]]


def to_fp16(source: Path, target: Path, _batches: Batches = ()) -> None:
    """Write the model with weights and activations in half precision; inputs and outputs keep their types."""
    model = onnx.load(source)
    heads = _heads(model.graph)
    trunk = onnx.utils.Extractor(model).extract_model(["image"], ["embedding"])
    with _quiet():
        # The heads are cut off first, since nodes that the converter excludes still pass on half precision.
        reduced = convert_float_to_float16(trunk, keep_io_types=True)
    wanted = {name for node in heads for name in node.input} - {tensor.name for tensor in reduced.graph.initializer}
    reduced.graph.node.extend(heads)
    reduced.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in wanted)
    reduced.graph.ClearField("output")
    reduced.graph.output.extend(model.graph.output)
    _save(reduced, target, like=model)


def to_int8(source: Path, target: Path, batches: Batches) -> None:
    """Write the model with weights and activations in 8 bits, with ranges calibrated on the given images."""
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
    """Write a converted model with the metadata of the original."""
    onnx.helper.set_model_props(model, {entry.key: entry.value for entry in like.metadata_props})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, target)


class _Calibration(CalibrationDataReader):  # type: ignore[misc]  # untyped
    """Reader of calibration batches for the quantiser."""

    def __init__(self, batches: Batches) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        """Return the next batch, or None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {"image": batch}


def _heads(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes that the embedding does not depend on."""
    needed, nodes = {"embedding"}, []
    for node in reversed(graph.node):  # sorted in execution order
        if needed.intersection(node.output):
            needed.update(node.input)
        else:
            nodes.append(node)
    return nodes[::-1]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress messages of the converters: advice that the exporter already follows, and warnings of tiny weights."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class PrecisionKind(NamedTuple):
    """Entry of the registry: the function that converts to a precision, and the devices that can serve it."""

    reduce: Callable[[Path, Path, Batches], None] | None  # fp32 file, new file, calibration batches; None: as exported
    calibrated: bool
    devices: tuple[Device, ...]
    refusal: str = ""  # reason against other devices
    instead: str = ""  # hint for them


# A new precision needs an entry here, its function above, and its name in `contract.Precision`.
PRECISIONS = {
    Precision.FP32: PrecisionKind(None, calibrated=False, devices=("cpu", "cuda", "tensorrt")),
    Precision.FP16: PrecisionKind(to_fp16, calibrated=False, devices=("cpu", "cuda", "tensorrt")),
    # TensorRT supports symmetric activations only, CPUs are fastest with unsigned ones.
    Precision.INT8: PrecisionKind(
        to_int8,
        calibrated=True,
        devices=("cpu",),
        refusal="int8 is quantised for CPUs",
        instead="use --precision fp16 on a GPU",
    ),
}


def precision_for(name: Precision | str, device: str) -> Precision:
    """Return the precision of this name; raise UsageError if there is none, or the device cannot serve it."""
    try:
        precision = Precision(name)
    except ValueError:
        known = [each.value for each in Precision]
        raise UsageError(f"'{name}' is not a precision", hint=did_you_mean(str(name), known)) from None
    kind = PRECISIONS[precision]
    if device not in kind.devices:
        raise UsageError(kind.refusal, hint=kind.instead)
    return precision
