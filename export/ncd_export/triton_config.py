"""Triton configuration of a model, config.pbtxt, generated completely from its ONNX file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

import onnx
from onnx import TensorProto

from ncd_serve.bundle import LABELS, Bundle
from ncd_serve.contract import DIGEST_FACT, FACT_PREFIX, GENERATION_FACT, OUTPUTS, PREPROCESS_FACT, THREADS

Device = Literal["cpu", "cuda", "tensorrt"]
MAX_BATCH = 64
MARK = f"{FACT_PREFIX}bundle"  # marks a folder in a repository as written by ncd-serve
# Smallest, usual and largest batch: for warm-up, and as TensorRT's shapes.
_BATCH_SIZES = (1, 8, MAX_BATCH)
_QUEUE_DELAY_MICROSECONDS = 500
_ENGINE_CACHE = "/var/cache/ncd-serve"  # building an engine takes minutes, so mount a volume here
_LABELLED = {
    output.name for output in OUTPUTS if output.shape == ("clusters",)
}  # outputs with the cluster names as labels
_TYPES = {"UINT8": "TYPE_UINT8", "INT64": "TYPE_INT64", "FLOAT": "TYPE_FP32", "BOOL": "TYPE_BOOL"}


@dataclass(frozen=True)
class TensorSpec:
    """Tensor of the graph as config.pbtxt declares it; `dims` are without the batch."""

    name: str
    data_type: str
    dims: tuple[int, ...]

    def to_pbtxt(self, label_file: str | None = None) -> str:
        """Return an entry of config.pbtxt. Triton has no empty dims: a scalar per image is [1], reshaped to []."""
        dims = ", ".join(str(dim) for dim in self.dims or (1,))
        reshape = "" if self.dims else " reshape { shape: [ ] }"
        labels = f' label_filename: "{label_file}"' if label_file else ""
        return f'  {{ name: "{self.name}" data_type: {self.data_type} dims: [ {dims} ]{reshape}{labels} }}'

    def shape(self, batch: int) -> str:
        """Return `name:BxHxWxC`, the form of TensorRT's profiles."""
        return f"{self.name}:{'x'.join(map(str, (batch, *self.dims)))}"


class Hardware(NamedTuple):
    """Device that serves a model."""

    device: Device = "cpu"
    cores: int | None = None  # of its CPU; None: as many as this machine has


THIS_CPU = Hardware()


def render_config(bundle: Bundle, *, name: str, hardware: Hardware) -> str:
    """Return the text of config.pbtxt: one instance per device, dynamic batching, warm-up."""
    device = hardware.device
    graph = onnx.load(bundle.model_path, load_external_data=False).graph
    (image,) = _tensors(graph.input)
    entries = [tensor.to_pbtxt(LABELS if tensor.name in _LABELLED else None) for tensor in _tensors(graph.output)]
    facts = {PREPROCESS_FACT: bundle.manifest.preprocess.model_dump_json(), MARK: bundle.manifest.bundle_id}
    facts[GENERATION_FACT] = str(bundle.manifest.generation)
    if bundle.digest:
        facts[DIGEST_FACT] = bundle.digest
    if device == "cpu":
        facts = {THREADS: str(hardware.cores or os.cpu_count() or 1), **facts}
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "onnxruntime"',
            f"max_batch_size: {MAX_BATCH}",
            _listed("input", [image.to_pbtxt()]),
            _listed("output", entries),
            f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_DELAY_MICROSECONDS} }}",
            f"instance_group [ {{ kind: {'KIND_CPU' if device == 'cpu' else 'KIND_GPU'} count: 1 }} ]",
            "version_policy { latest { num_versions: 1 } }",
            _listed("model_warmup", [_warm_up(image, batch) for batch in _BATCH_SIZES]),
            *_accelerator(device, image, name=name, precision=bundle.manifest.precision),
            *(
                f'parameters {{ key: "{key}" value {{ string_value: {_quoted(text)} }} }}'
                for key, text in facts.items()
            ),
            "",
        ]
    )


def _accelerator(device: Device, image: TensorSpec, *, name: str, precision: str) -> list[str]:
    """Return GPU settings of NVIDIA's onnxruntime backend; nodes that TensorRT cannot run fall back to CUDA."""
    if device == "cpu":
        return []
    if device == "cuda":
        settings = {"cudnn_conv_use_max_workspace": "1", "use_ep_level_unified_stream": "1"}
    else:
        least, usual, most = (image.shape(batch) for batch in _BATCH_SIZES)
        settings = {
            "precision_mode": precision.upper(),
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": _ENGINE_CACHE,
            "trt_engine_cache_prefix": name,
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": _ENGINE_CACHE,
            "trt_profile_min_shapes": least,
            "trt_profile_opt_shapes": usual,
            "trt_profile_max_shapes": most,
        }
    lines = [f'  parameters {{ key: "{key}" value: "{value}" }}' for key, value in settings.items()]
    head = f'optimization {{ execution_accelerators {{ gpu_execution_accelerator [ {{ name: "{device}"'
    return ["\n".join([head, *lines, "} ] } }"])]


def _warm_up(image: TensorSpec, batch: int) -> str:
    dims = ", ".join(str(dim) for dim in image.dims)
    tensor = f'key: "{image.name}" value {{ data_type: {image.data_type} dims: [ {dims} ] zero_data: true }}'
    return f'  {{ name: "batch of {batch}" batch_size: {batch} inputs {{ {tensor} }} }}'


def _tensors(values: list[onnx.ValueInfoProto]) -> list[TensorSpec]:
    return [
        TensorSpec(
            value.name,
            _TYPES[TensorProto.DataType.Name(value.type.tensor_type.elem_type)],
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]),
        )
        for value in values
    ]


def _listed(field: str, entries: list[str]) -> str:
    return f"{field} [\n" + ",\n".join(entries) + "\n]"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
