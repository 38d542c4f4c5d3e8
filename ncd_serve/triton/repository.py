"""Checks that a folder is a model repository that Triton can load, and that loading it runs no foreign code."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from ncd_serve.errors import DataError
from ncd_serve.triton.jpeg import shipped_code
from ncd_serve.triton.signed import check_signed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = "config.pbtxt"
LAYOUT = "a model repository holds MODEL/1/model.onnx and only such folders; `ncd-serve export` writes one"
# Triton passes the path of a model to its stub through a shell, unquoted, and looks for backends by their names.
MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# What Triton, its stub or Python run when they find it beside a model.
CODE = re.compile(r".*\.(py|pyc|pyd|so|sh|zip|gz|tar)(\.\d+)*|triton_python_backend_stub")
MAX_FILES = 10_000  # of one model
VERSION = re.compile(r"[1-9][0-9]*")  # Triton skips all others
MODEL_FILES = {"onnxruntime": "model.onnx", "python": "model.py"}


def check_repository(repository: Path, *, python_models: bool = False, public_key: str | None = None) -> list[str]:
    """Return the names of the models; raise DataError with the reason if Triton cannot or must not load them.

    Models that run code of their own are refused unless `python_models` allows them; with a public key, all models
    that are not of a bundle which its owner signed.
    """
    models = model_folders(repository)
    for model in models:
        check_model(model, python_models=python_models, public_key=public_key)
    return [model.name for model in models]


def model_folders(repository: Path) -> list[Path]:
    """Return the folders of the models, with any content; raise DataError if this is no repository."""
    try:
        if (repository / CONFIG).exists() or any(VERSION.fullmatch(entry.name) for entry in repository.iterdir()):
            raise DataError(
                f"{repository} is the folder of one model, not a repository",
                hint=f"use --repository {_parent(repository)}",
            )
        models = sorted(entry for entry in repository.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if not models:
            raise DataError(f"no model folders in {repository}", hint=LAYOUT)
        return models
    except OSError as error:
        raise _unreadable(error) from error


def check_model(model: Path, *, python_models: bool = False, public_key: str | None = None) -> Any:
    """Return the configuration of a model; raise DataError with the reason if Triton cannot or must not load it."""
    try:
        if not MODEL_NAME.fullmatch(model.name):
            raise DataError(f"'{model.name}' is not a valid model name: use letters, digits, and _ . -", hint=LAYOUT)
        config = read_config(model / CONFIG)
        if config.name not in ("", model.name):
            raise DataError(
                f"{model / CONFIG} names the model '{config.name}', its folder '{model.name}'",
                hint="both names must be equal",
            )
        _check_names(model, config)
        for label_file in {output.label_filename for output in config.output} - {""}:
            if not (model / label_file).is_file():
                raise DataError(
                    f"{model / CONFIG} needs the labels {label_file}, which do not exist", hint="export again"
                )
        versions = model_versions(model, config)
        if not python_models and (code := next(_foreign_code(model, config, versions), None)):
            raise DataError(
                f"the model '{model.name}' runs code of its own: {code}",
                hint="export again if it is an older export; allow it only if you trust it: --allow-python-models",
            )
        if public_key is not None:
            check_signed(model, config, _loaded(config, versions), public_key)
        return config
    except OSError as error:
        raise _unreadable(error) from error


def _check_names(model: Path, config: Any) -> None:
    """Refuse names that are more than names: Triton would pass them to a shell, or leave the folder of the model."""
    names = {
        "default_model_filename": [config.default_model_filename],
        "cc_model_filenames": list(config.cc_model_filenames.values()),
        "backend": [config.backend],
        "platform": [config.platform],
        "runtime": [config.runtime],
        "label_filename": [output.label_filename for output in config.output],
        "EXECUTION_ENV_PATH": [_environment(config).replace("$$TRITON_MODEL_DIRECTORY", "").replace("/", "")],
    }
    for field, values in names.items():
        for value in values:
            if value and not FILE_NAME.fullmatch(value):
                raise DataError(
                    f"{model / CONFIG}: {field} is not a plain name: {value[:80]!r}",
                    hint="use letters, digits, and _ . -",
                )


def _environment(config: Any) -> str:
    """Return the Python environment that a model brings; not by its key, which would add it to the configuration."""
    found = {key: value.string_value for key, value in config.parameters.items()}
    return found.get("EXECUTION_ENV_PATH", "")


def _foreign_code(model: Path, config: Any, versions: list[Path]) -> Iterator[str]:
    """Yield what a model would run that is not ours, in the folders that Triton would load from."""
    if _environment(config):
        yield f"EXECUTION_ENV_PATH in {CONFIG}"
    if config.model_operations.op_library_filename or config.model_repository_agents.agents:
        yield f"libraries in {CONFIG}"
    ours = shipped_code()
    for file in (entry for entry in model.iterdir() if CODE.fullmatch(entry.name.lower())):
        yield file.name
    for version in _loaded(config, versions):
        for path in _files(version):
            if CODE.fullmatch(path.rpartition("/")[2].lower()) and ours.get(path) != (version / path).read_bytes():
                yield f"{version.name}/{path}"


def _loaded(config: Any, versions: list[Path]) -> list[Path]:
    """Return the versions that Triton would load."""
    kept = config.version_policy.WhichOneof("policy_choice")
    newest = max(1, config.version_policy.latest.num_versions)
    return versions if kept in ("all", "specific") else versions[-newest:]


def _files(folder: Path) -> Iterator[str]:
    """Yield the files below a folder by their path in it, through links too: Python follows them."""
    found = 0
    for parent, folders, files in os.walk(folder, followlinks=True):
        # Compiled files there are not read: a server has a folder of its own for them.
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            found += 1
            if found > MAX_FILES:
                raise DataError(f"more than {MAX_FILES:,} files in {folder}", hint=LAYOUT)
            yield os.path.relpath(os.path.join(parent, name), folder)  # noqa: PTH118


def model_versions(model: Path, config: Any) -> list[Path]:
    """Return the folders of the versions that Triton would see, the newest last."""
    versions = sorted(
        (entry for entry in model.iterdir() if VERSION.fullmatch(entry.name)), key=lambda entry: int(entry.name)
    )
    expected = MODEL_FILES.get(config.backend or "onnxruntime") if config.platform != "ensemble" else None
    if expected is not None:  # other backends have files of their own
        expected = config.default_model_filename or expected
        versions = [version for version in versions if (version / expected).is_file()]
        for file in (version / expected for version in versions):
            if not os.access(file, os.R_OK):
                raise DataError(f"cannot read {file}: permission denied", hint="chmod a+r it")
    if not versions:
        raise DataError(f"no version{f' with a {expected}' if expected else ''} in {model}", hint=LAYOUT)
    return versions


def load_configs(model: Path) -> tuple[str, str] | None:
    """Return two configurations for Triton's load call: one that keeps one more version, and the configured one.

    None if there is no configuration, or it keeps other versions than the latest ones.
    """
    from google.protobuf.json_format import MessageToJson  # type: ignore[import-untyped]

    config = read_config(model / CONFIG)
    if not config.backend or config.version_policy.WhichOneof("policy_choice") not in (None, "latest"):
        return None
    exact = MessageToJson(config, preserving_proto_field_name=True)
    config.version_policy.latest.num_versions = max(1, config.version_policy.latest.num_versions) + 1
    return MessageToJson(config, preserving_proto_field_name=True), exact


def _parent(repository: Path) -> Path:
    return repository.resolve().parent


def _unreadable(error: OSError) -> DataError:
    return DataError(f"cannot read {error.filename}: {error.strerror}", hint=LAYOUT)


def read_config(path: Path) -> Any:
    """Return the configuration; empty if there is none, since Triton completes it from the model."""
    from google.protobuf import text_format  # type: ignore[import-untyped]
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig()
    if path.is_file():
        try:
            text_format.Parse(path.read_text(), config)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged: {error}", hint="export again") from None
    return config
