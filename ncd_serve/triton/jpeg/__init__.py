"""Second model beside an exported one, from image files to cluster id, name and confidence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ncd_serve
from ncd_serve.bundle import MANIFEST, Bundle
from ncd_serve.errors import DataError
from ncd_serve.files import atomic_directory, is_unfinished, write_text
from ncd_serve.signature import copy_signature

MAX_BATCH = 16
INSTANCES, DECODERS = 2, 2  # processes of the model, and processes that decode for each of them
_SUFFIX = "_jpeg"
_MARK = "ncd_jpeg_of"
_CARRIED = (
    "preprocess.py",
    "budget.py",
    "errors.py",
    "triton/jpeg/decoder.py",
)  # the server need not have ncd-serve: the model brings what it calls
_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {max_batch}
input [
  {{ name: "image" data_type: TYPE_STRING dims: [ 1 ] }}
]
output [
  {{ name: "cluster_id" data_type: TYPE_INT64 dims: [ 1 ] }},
  {{ name: "cluster_name" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "confidence" data_type: TYPE_FP32 dims: [ 1 ] }},
  {{ name: "json" data_type: TYPE_STRING dims: [ 1 ] }}
]
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
version_policy {{ latest {{ num_versions: 1 }} }}
parameters {{ key: "{mark}" value {{ string_value: "{asked}" }} }}
parameters {{ key: "ncd_decoders" value {{ string_value: "{decoders}" }} }}
"""


def jpeg_model_name(name: str) -> str:
    """Return the name of the model that takes image files for the model `name`."""
    return name + _SUFFIX


def asked_by(config: Any) -> str:
    """Return the model that a model for image files asks; an empty text for all other models."""
    found = {key: value.string_value for key, value in config.parameters.items()}
    return found.get(_MARK, "")


def add_jpeg_model(bundle: Bundle, repository: Path, *, name: str, version: int) -> Path:
    """Add the model that takes image files for version `version` of the model `name`; return the folder of its version.

    To be called before that version itself appears, which may be loaded at once: its names have to be there by then.
    """
    folder = repository / jpeg_model_name(name)
    config = folder / "config.pbtxt"
    made_here = is_unfinished(folder) or (config.is_file() and _MARK in config.read_text())
    if folder.exists() and not made_here:
        raise DataError(f"{folder} was not made by ncd-serve", hint="choose another --model-name or repository")
    text = _CONFIG.format(
        name=folder.name, max_batch=MAX_BATCH, instances=INSTANCES, mark=_MARK, asked=name, decoders=DECODERS
    )
    if not config.is_file() or config.read_text() != text:  # a server that watches reloads what is touched
        write_text(config, text)
    target = folder / str(version)
    with atomic_directory(target) as fresh:
        shutil.copyfile(bundle.folder / MANIFEST, fresh / MANIFEST)
        copy_signature(bundle.folder, fresh)
        for path, source in shipped_code().items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).write_bytes(source)
    return target


def shipped_code() -> dict[str, bytes]:
    """Return the code in a version's folder, by path: the model, and the modules of this package that it carries."""
    here, package = Path(__file__).parent, Path(ncd_serve.__file__).parent
    carried = {f"ncd_serve/{name}": (package / name).read_bytes() for name in _CARRIED}
    packages = {str(parent) for name in carried for parent in Path(name).parents if parent != Path()}
    markers = {f"{name}/__init__.py": b"" for name in sorted(packages)}
    return {"model.py": (here / "model.py").read_bytes(), **carried, **markers}
