"""Triton's `onnxruntime` backend in Python: stands in where the server has no C++ one (the pip wheel).

Triton runs this file inside its stub process, so it imports numpy, onnxruntime and Triton's own utilities only.
It follows the same config.pbtxt as the C++ backend, and raises an error for settings that it does not support, so
that a repository which works here also works in production.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils

DEFAULT_MAX_BATCH_SIZE = 4  # what Triton's core hands to the C++ backend when a config leaves it out
THREAD_PARAMETERS = ("intra_op_thread_count", "inter_op_thread_count")
FACT_PREFIX = "ncd_"  # facts for clients, which no backend acts on
REFUSED = {  # section of the configuration -> keys that would be ignored
    "": ("batch_input", "batch_output", "cc_model_filenames", "model_operations", "sequence_batching"),
    "input": ("allow_ragged_batch", "is_shape_tensor", "optional"),
    "instance_group": ("host_policy", "passive"),
    "model_transaction_policy": ("decoupled",),
    "optimization": ("cuda", "eager_batching", "execution_accelerators", "graph", "priority"),
}
TRITON_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
}


class TritonPythonModel:
    """One instance of one served ONNX model."""

    @staticmethod
    def auto_complete_config(model_config: Any) -> Any:
        """Complete config.pbtxt by the rules of the C++ backend."""
        config = model_config.as_dict()
        if not (config["input"] and config["output"]):
            _complete(config, _open_session(config))
        return model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model, or raise with the reason that Triton then reports."""
        config = json.loads(args["model_config"])
        self._session = _open_session(config)
        self._batched = config["max_batch_size"] > 0
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        self._inputs = [tensor.name for tensor in inputs]
        _check_tensors(config["input"], inputs, self._batched)
        _check_tensors(config["output"], outputs, self._batched)
        if undeclared := set(self._inputs) - {tensor["name"] for tensor in config["input"]}:
            raise ValueError(f"config.pbtxt lacks the model's input {', '.join(sorted(undeclared))}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests of one dynamic batch, in their order."""
        groups = [requests] if self._batched else [[request] for request in requests]
        return [response for group in groups for response in self._answer(group)]

    def _answer(self, requests: list[Any]) -> list[Any]:
        try:
            return self._run(requests)
        except Exception as error:  # every waiting client needs a response, for any error
            if len(requests) > 1:  # one of them is to blame, and the others are not
                return [response for request in requests for response in self._answer([request])]
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))]

    def _run(self, requests: list[Any]) -> list[Any]:
        wanted = sorted({name for request in requests for name in request.requested_output_names()})
        parts = {
            name: [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self._inputs
        }
        feeds = {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in parts.items()}
        outputs = dict(zip(wanted, self._session.run(wanted, feeds), strict=True))
        if len(requests) == 1:
            return [_response(requests[0], outputs)]
        ends = np.cumsum([len(array) for array in parts[self._inputs[0]]])
        for name, array in outputs.items():
            if len(array) != ends[-1]:
                raise ValueError(f"output '{name}' has {len(array)} rows for a batch of {ends[-1]}")
        return [
            _response(request, {name: array[start:end] for name, array in outputs.items()})
            for request, start, end in zip(requests, [0, *ends[:-1]], ends, strict=True)
        ]


def _response(request: Any, outputs: dict[str, Any]) -> Any:
    names = request.requested_output_names()
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name]) for name in names])


def _open_session(config: dict[str, Any]) -> Any:
    if int(np.__version__.split(".")[0]) >= 2:
        raise ValueError(f"numpy {np.__version__} is installed, but this Triton corrupts numpy 2 arrays: needs numpy<2")
    _refuse_what_would_be_ignored(config)
    threads = [int(config["parameters"].get(key, {}).get("string_value", 0)) for key in THREAD_PARAMETERS]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads
    return ort.InferenceSession(_model_path(), options, providers=["CPUExecutionProvider"])


def _model_path() -> str:
    # Auto-completion gets the config only, so the path is taken from the stub's arguments.
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")[1].decode()


def _refuse_what_would_be_ignored(config: dict[str, Any]) -> None:
    refused = [f"parameters: {key}" for key in config["parameters"] if not _is_harmless(key)]
    for section, keys in REFUSED.items():
        found = config.get(section, {}) if section else config
        for entry in found if isinstance(found, list) else [found]:
            refused += [f"{section}: {key}" if section else key for key in keys if _is_set(entry.get(key))]
    if refused:
        raise ValueError(f"this CPU backend cannot honour {', '.join(refused)}; remove it or use NVIDIA's container")


def _is_set(value: Any) -> bool:
    return bool(value) and value != "PRIORITY_DEFAULT"


def _is_harmless(parameter: str) -> bool:
    return parameter in THREAD_PARAMETERS or parameter.startswith(FACT_PREFIX)


def _shape(tensor: Any) -> list[int]:
    """Return the dimensions of an ONNX tensor in Triton's form, -1 for variable ones."""
    return [size if isinstance(size, int) else -1 for size in tensor.shape]


def _complete(config: dict[str, Any], session: Any) -> None:
    inputs, outputs = session.get_inputs(), session.get_outputs()
    can_batch = all(_shape(tensor)[:1] == [-1] for tensor in (*inputs, *outputs))
    if can_batch and config["max_batch_size"] == 0:
        config["max_batch_size"] = DEFAULT_MAX_BATCH_SIZE
    if config["max_batch_size"] > 1:
        config.setdefault("dynamic_batching", {})
    batched = config["max_batch_size"] > 0
    config["input"] = config["input"] or [_describe(tensor, batched) for tensor in inputs]
    config["output"] = config["output"] or [_describe(tensor, batched) for tensor in outputs]


def _describe(tensor: Any, batched: bool) -> dict[str, Any]:
    dims = _shape(tensor)[1 if batched else 0 :]
    described = {"name": tensor.name, "data_type": TRITON_TYPES[tensor.type], "dims": dims or [1]}
    # Triton has no empty dims: one value per image is declared as [1] and reshaped to nothing.
    return described if dims else {**described, "reshape": {"shape": []}}


def _check_tensors(declared: list[dict[str, Any]], provided: list[Any], batched: bool) -> None:
    """Raise where config.pbtxt contradicts the model, as the C++ backend would."""
    by_name = {tensor.name: tensor for tensor in provided}
    for wanted in declared:
        name = wanted["name"]
        if name not in by_name:
            raise ValueError(f"config.pbtxt names '{name}', model.onnx has {', '.join(by_name)}")
        tensor, shape = by_name[name], _shape(by_name[name])
        if wanted["data_type"] != TRITON_TYPES.get(tensor.type):
            raise ValueError(f"'{name}' is {wanted['data_type']} in config.pbtxt, {tensor.type} in model.onnx")
        dims = [-1] * batched + (wanted["reshape"]["shape"] if "reshape" in wanted else wanted["dims"])
        if len(dims) != len(shape) or any(size not in (-1, dim) for dim, size in zip(dims, shape, strict=True)):
            raise ValueError(f"'{name}' is {dims} in config.pbtxt, {shape} in model.onnx")
