"""Initial weights of trunk and tail, and a report of the tensors that a file provided."""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path, sha256
from ncd_training.base.run_dir import InitialWeights, weights_path
from ncd_training.base.vision import resample_abs_pos_embed
from ncd_training.model.onnx import configured_trunk
from ncd_training.model.trunk import TRUNKS, TrunkParts, build_trunk

if TYPE_CHECKING:
    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import Trunk


_MAX_NAMES = 4  # of tensors in a message
_COUNTER = "num_batches_tracked"  # of batch norm; missing in old files, and nothing reads it


@dataclass(frozen=True)
class WeightsReport:
    """Report of the tensors taken from a file: always all that trunk and tail need."""

    file: WeightFile
    matched: int
    unused: list[str]

    @property
    def line(self) -> str:
        """Line of the plan."""
        unused = f" (unused: {_listed(self.unused)})" if self.unused else ""
        return f"{self.file.format} weights: {self.matched} of {self.matched} tensors from {self.file.path}{unused}"

    def facts(self) -> InitialWeights:
        """Return the entry of the run's summary and the model card."""
        file = self.file
        return InitialWeights(file=file.path.name, format=file.format, sha256=sha256(file.path))


def initial_trunk(config: TrainConfig, *, weights: Path | None) -> tuple[TrunkParts, WeightsReport | None]:
    """Build the configured backbone with weights of a file or random weights, and their normalisation."""
    torch.manual_seed(config.optim.seed)  # also for the heads, which are built next
    parts = build_trunk(config.model.trunk, resolution=config.data.resolution)
    report = load_weights(parts, weights) if weights else None
    file = report.file if report else None
    mean = config.model.mean or (file and file.mean) or parts.mean
    std = config.model.std or (file and file.std) or parts.std
    return replace(parts, mean=mean, std=std), report


def check_weights(config: TrainConfig) -> None:
    """Raise if the configured backbone is unknown, cannot run, or does not fit the weights; do not allocate it."""
    configured_trunk(config)
    with torch.device("meta"):
        parts = build_trunk(config.model.trunk, resolution=config.data.resolution)
    if config.model.weights is not None:
        _match(parts, read_weights(config.model.weights))


def load_weights(parts: TrunkParts, path: Path) -> WeightsReport:
    """Copy a file's weights into trunk and tail; DataError if one is missing."""
    file = read_weights(path)
    matched, unused = _match(parts, file)
    targets = parts.network.state_dict()
    for name, tensor in matched.items():
        targets[name].copy_(tensor)
    return WeightsReport(file, len(matched), unused)


def save_weights(parts: TrunkParts, path: Path, *, trunk: Trunk, facts: dict[str, str]) -> None:
    """Write the weights of trunk and tail under the network's names, and the normalisation of these weights."""
    state = parts.network.state_dict()
    tensors = {name: state[name].cpu().contiguous() for name in _places(parts).values()}
    moments = {"mean": json.dumps(channels(trunk.mean)), "std": json.dumps(channels(trunk.std))}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={**facts, **moments})


def _match(parts: TrunkParts, file: WeightFile) -> tuple[dict[str, Tensor], list[str]]:
    """Return the file's tensors by the network's names, and the names of unused tensors."""
    wanted, found = _compare(parts, file)
    fitting = {name: found[name] for name in wanted if name in found and found[name].shape == wanted[name].shape}
    if len(fitting) < len(wanted):
        raise DataError(_misfit(file, wanted, found, len(fitting)), hint=_other_trunk(file))
    unused = [name for name in found if name not in wanted and not name.endswith(_COUNTER)]
    return fitting, unused


def _compare(parts: TrunkParts, file: WeightFile) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that trunk and tail need and those of a file, both under the network's names."""
    network, places = parts.network.state_dict(), _places(parts)
    wanted = {name: network[name] for name in places.values() if not name.endswith(_COUNTER)}
    found = {places.get(name, name): tensor for name, tensor in file.tensors.items()}
    if "pos_embed" in wanted and "pos_embed" in found:
        found["pos_embed"] = _resampled(found["pos_embed"], wanted["pos_embed"], parts.network)
    return wanted, found


def _places(parts: TrunkParts) -> dict[str, str]:
    """Return the network's names of the tensors of trunk and tail, by their names in checkpoints of a run."""
    names = {id(tensor): name for name, tensor in parts.network.state_dict(keep_vars=True).items()}
    return {
        f"{prefix}.{name}": names[id(tensor)]
        for prefix, module in (("trunk.stages", parts.frozen), ("branches.0.tail", parts.tail))
        for name, tensor in module.state_dict(keep_vars=True).items()
    }


def _resampled(given: Tensor, wanted: Tensor, vit: Any) -> Tensor:
    """Resample position embeddings [1, 1 + h*w, d] of a square grid to the grid of another resolution."""
    same_width = given.dim() == 3 and given.shape[-1] == wanted.shape[-1]
    side = round(max(given.shape[1] - 1, 0) ** 0.5) if same_width else 0
    if given.shape == wanted.shape or side == 0 or side * side != given.shape[1] - 1:
        return given
    resampled: Tensor = resample_abs_pos_embed(given, list(vit.patch_embed.grid_size), [side, side])
    return resampled


def _misfit(file: WeightFile, wanted: dict[str, Tensor], found: dict[str, Tensor], matched: int) -> str:
    holds = [f"{name} {list(tensor.shape)}" for name, tensor in file.tensors.items()]
    missing = [name for name in wanted if name not in found]
    other = [
        f"{name} {list(found[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    text = f"{file.path} does not fit the backbone: {matched} of {len(wanted)} tensors match"
    text += f"; missing: {_listed(missing)}" if missing else ""
    text += f"; wrong shape: {_listed(other)}" if other else ""
    return f"{text}; the file holds {len(holds)} tensors, format {file.format}: {_listed(holds)}"


def _other_trunk(file: WeightFile) -> str:
    for name in TRUNKS:
        with torch.device("meta"):
            parts = build_trunk(name, resolution=224)
        wanted, found = _compare(parts, file)
        if all(name in found and found[name].shape == tensor.shape for name, tensor in wanted.items()):
            return f"use the backbone that the file fits: --set model.trunk={name}"
    return f"use weights of one of the backbones {', '.join(TRUNKS)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


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
