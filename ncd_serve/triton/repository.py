"""Whether a folder is a Triton model repository of ONNX models."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ncd_serve.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = "a model repository holds MODEL/1/model.onnx and nothing but such folders; `ncd-serve export` writes one"
# Triton passes the path of a model to its stub through a shell, unquoted.
MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
VERSION = re.compile(r"[1-9][0-9]*")  # Triton skips all others


def check_repository(repository: Path) -> int:
    """The number of models; raises DataError with the reason when Triton has no chance to load what is there."""
    try:
        models = sorted(entry for entry in repository.iterdir() if entry.is_dir())
        if not models:
            raise DataError(f"no model folders in {repository}", hint=LAYOUT)
        for model in models:
            _check_model(model)
        return len(models)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}", hint=LAYOUT) from error


def _check_model(model: Path) -> None:
    if not MODEL_NAME.fullmatch(model.name):
        raise DataError(f"'{model.name}' cannot be a model name: only letters, digits, and _ . - can", hint=LAYOUT)
    files = [entry / "model.onnx" for entry in model.iterdir() if VERSION.fullmatch(entry.name)]
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(f"no version with a model.onnx in {model}", hint=LAYOUT)
    for file in files:
        if not os.access(file, os.R_OK):
            raise DataError(f"cannot read {file}: permission denied", hint="chmod a+r it")
