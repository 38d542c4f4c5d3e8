"""Weight files of any origin, read without running code that may be pickled in them."""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ncd_serve.errors import DataError
from ncd_training.base.run_dir import weights_path

Channels = tuple[float, float, float]

# Keys under which checkpoints keep their tensors. Averaged weights come first: papers report their results.
_WRAPPERS = ("teacher", "student", "state_dict_ema", "model_ema", "state_dict", "model")
_NOT_WEIGHTS = {
    b"<": ("is a web page, not weights", "open the address in a browser and download the file itself"),
    b"version https://git-lfs": ("is a Git LFS pointer, not weights", "fetch the file itself with: git lfs pull"),
}
_COPY_AGAIN = "download or copy it again"


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
            return WeightFile(path, format_, inner)
    return WeightFile(path, _guess(tensors), tensors)


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
    with path.open("rb") as stream:
        start = stream.read(64)
    if not start:
        raise DataError(f"{path} is empty", hint=_COPY_AGAIN)
    for beginning, (problem, hint) in _NOT_WEIGHTS.items():
        if start.lstrip().startswith(beginning):
            raise DataError(f"{path} {problem}", hint=hint)
    # A safetensors file begins with the length of its header in 8 bytes, then the header as JSON.
    return _safetensors(path) if start[8:9] == b"{" else (_pickled(path), {})


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}, stored.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}", hint=_COPY_AGAIN) from None


def _pickled(path: Path) -> Mapping[str, Any]:
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


def _tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, which may be inside a checkpoint, without the prefix of data parallelism."""
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _tensors(content[key])
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return _below("module.", tensors) or tensors


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
