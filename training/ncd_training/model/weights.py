"""Initial weights of trunk and tail, and a report of the tensors that a file provided."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path, sha256
from ncd_training.base.scores import InitialWeights
from ncd_training.base.vision import resample_abs_pos_embed
from ncd_training.model.onnx import configured_trunk
from ncd_training.model.trunk import TRUNKS, TrunkParts, build_trunk
from ncd_training.model.weight_files import WeightFile, channels, read_weights

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
