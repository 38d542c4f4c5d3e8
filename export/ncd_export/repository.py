"""A model's folder in a Triton repository, generated from the ONNX file: config.pbtxt, labels.txt, 1/model.onnx."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from ncd_serve.bundle import LABELS, MODEL, Bundle
from ncd_serve.contract import FACT_PREFIX, PREPROCESS_FACT
from ncd_serve.errors import DataError
from ncd_serve.files import atomic_directory, write_text
from ncd_serve.triton.jpeg import add_jpeg_model

MAX_BATCH = 64
_QUEUE_DELAY_MICROSECONDS = 500
_TYPES = {"UINT8": "TYPE_UINT8", "INT64": "TYPE_INT64", "FLOAT": "TYPE_FP32", "BOOL": "TYPE_BOOL"}
_MARK = f"{FACT_PREFIX}bundle"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the graph as config.pbtxt declares it; `dims` leave out the batch."""

    name: str
    data_type: str
    dims: tuple[int, ...]

    def to_pbtxt(self, label_file: str | None = None) -> str:
        """One entry. Triton has no empty dims: one value per image is declared as [1] and reshaped to nothing."""
        dims = ", ".join(str(dim) for dim in self.dims or (1,))
        reshape = "" if self.dims else " reshape { shape: [ ] }"
        labels = f' label_filename: "{label_file}"' if label_file else ""
        return f'  {{ name: "{self.name}" data_type: {self.data_type} dims: [ {dims} ]{reshape}{labels} }}'


def add_to_repository(bundle: Bundle, repository: Path, *, name: str) -> Path:
    """Add the bundle's model as the next version; returns the version's folder."""
    folder = repository / name
    config = folder / "config.pbtxt"
    if folder.exists() and not (config.is_file() and _MARK in config.read_text()):
        raise DataError(f"{folder} was not made by ncd-serve", hint="choose another --model-name or repository")
    versions = [int(entry.name) for entry in folder.glob("[0-9]*") if entry.name.isdigit()]
    target = folder / str(max(versions, default=0) + 1)
    add_jpeg_model(bundle, repository, name=name, version=int(target.name))
    with atomic_directory(target) as fresh:
        shutil.copyfile(bundle.model_path, fresh / MODEL)
    # The version is complete before the configuration names its labels: a server that looks now sees either state.
    shutil.copyfile(bundle.folder / LABELS, folder / LABELS)
    write_text(config, render_config(bundle, name=name))
    return target


def render_config(bundle: Bundle, *, name: str, cores: int | None = None) -> str:
    """config.pbtxt for a CPU: one instance that uses every core, dynamic batching, warmed up."""
    graph = onnx.load(bundle.model_path, load_external_data=False).graph
    (image,) = _tensors(graph.input)
    outputs = _tensors(graph.output)
    facts = {
        "intra_op_thread_count": str(cores or os.cpu_count() or 1),
        PREPROCESS_FACT: bundle.manifest.preprocess.model_dump_json(),
        _MARK: bundle.manifest.bundle_id,
    }
    entries = [tensor.to_pbtxt(LABELS if tensor.name == "probabilities" else None) for tensor in outputs]
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "onnxruntime"',
            f"max_batch_size: {MAX_BATCH}",
            f"input [\n{image.to_pbtxt()}\n]",
            "output [\n" + ",\n".join(entries) + "\n]",
            f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_DELAY_MICROSECONDS} }}",
            "instance_group [ { kind: KIND_CPU count: 1 } ]",
            "version_policy { latest { num_versions: 1 } }",
            _warm_up(image),
            *(
                f'parameters {{ key: "{key}" value {{ string_value: "{_escaped(value)}" }} }}'
                for key, value in facts.items()
            ),
            "",
        ]
    )


def _warm_up(image: TensorSpec) -> str:
    dims = ", ".join(str(dim) for dim in image.dims)
    tensor = f'key: "{image.name}" value {{ data_type: {image.data_type} dims: [ {dims} ] zero_data: true }}'
    return f'model_warmup [ {{ name: "one image" batch_size: 1 inputs {{ {tensor} }} }} ]'


def _tensors(values: list[onnx.ValueInfoProto]) -> list[TensorSpec]:
    return [
        TensorSpec(
            value.name,
            _TYPES[TensorProto.DataType.Name(value.type.tensor_type.elem_type)],
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]),
        )
        for value in values
    ]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
