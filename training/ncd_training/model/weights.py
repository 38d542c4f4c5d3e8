"""Initial weights of trunk and tail, and a report of the tensors that a file provided."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import atomic_path, sha256
from ncd_training.base.run_dir import InitialWeights
from ncd_training.model.backbone import ALIASES, OWN, Backbone, build_trunk
from ncd_training.model.branches import Trunk
from ncd_training.model.hub import PACKAGE, find_weights, locate, missing_weights, packaged_file, repository_of
from ncd_training.model.map_cache import cache_bytes, cache_room
from ncd_training.model.onnx import configured_trunk
from ncd_training.model.trunk import TrunkParts
from ncd_training.model.weight_files import WeightFile, channels, read_weights

if TYPE_CHECKING:
    from ncd_serve.progress import Progress
    from ncd_training.config.schema import ModelConfig, TrainConfig


# Known birds of 160 px, played as novel: 0.580 at 160 px, 0.613 at 192, 0.630 at 224 (the backbone's own size), 0.644
# at 256. Known classes of CIFAR-10, of 32 px: nearest neighbours right in 0.72 at 64 px, 0.79 from 96 to 160, 0.77 at
# 224 (EfficientNet-Lite0, initial features).
_MAX_ENLARGEMENT, _MIN_SIDE = 4, 64
# Caches of trunk maps, the best first: views per image, share of the resolution, what is trained after the trunk.
_CACHES: tuple[tuple[int, float, Literal["stage", "adapter"]], ...] = (
    (8, 1.0, "stage"),
    (4, 1.0, "stage"),
    (4, 0.75, "stage"),
    (2, 0.75, "stage"),
    (8, 1.0, "adapter"),
    (2, 1.0, "adapter"),
)
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

    def facts(self, licence: str | None = None) -> InitialWeights:
        """Return the entry of the run's summary and the model card; `licence` is that of the backbone's weights."""
        file, origin = self.file, repository_of(self.file.path)
        repository, revision = origin or (f"package {PACKAGE}" if file.path == packaged_file() else None, None)
        return InitialWeights(
            file=file.path.name,
            format=file.format,
            sha256=sha256(file.path),
            repository=repository,
            revision=revision,
            licence=licence,
        )


def settle(config: TrainConfig, *, images: int, progress: Progress, side: int | None = None) -> TrainConfig:
    """Return the settings with all that follows from the backbone: architecture, image size, file of weights.

    `side` is the shorter side of a typical image: where no size is set, images are enlarged at most four times.
    Raises if the backbone is unknown, does not fit the weights, or would be frozen with random ones.
    """
    configured_trunk(config)
    model, data = config.model, config.data
    backbone = locate(model.backbone, progress=progress)
    size = _image_size(config, backbone, side)
    found = find_weights(backbone, model.weights, download=model.download, progress=progress)
    learns = config.rotations.epochs or config.from_labels.epochs
    if found is None and model.weights != "none" and not learns:
        raise missing_weights(backbone)
    facts: dict[str, Any] = {
        "architecture": backbone.architecture,
        "arguments": backbone.arguments,
        "licence": found.licence if found else None,
        "weights": str(found.path.absolute()) if found else "none",
    }
    if ":" in model.backbone:  # its normalisation is not in timm's list
        facts |= {"mean": model.mean or backbone.mean, "std": model.std or backbone.std}
    update: dict[str, Any] = {"data": data.model_copy(update=size), "model": model.model_copy(update=facts)}
    if found and model.weights == "auto":
        update["rotations"] = config.rotations.model_copy(update={"epochs": 0})  # only for want of weights
    settled = config.model_copy(update=update)
    parts = configured_parts(settled.model, settled.data.resolution)
    if found:
        _match(parts, read_weights(found.path))
    origin = f"weights from {found.origin}" if found else "random weights"
    progress.say(f"backbone {model.backbone} at {settled.data.resolution} px, {parts.cut}, {origin}")
    return with_cache(settled, images=images, progress=progress)


def with_cache(config: TrainConfig, *, images: int, progress: Progress) -> TrainConfig:
    """Return the settings with `data.cache_views=auto` replaced by the best cache that fits; say which and why."""
    if config.data.cache_views != "auto":
        return config
    room = cache_room(config.data.cache_dir or Path())
    for views, share, tail in _CACHES:
        side = locate(config.model.backbone, progress=progress).fitting(round(share * config.data.resolution))
        data = config.data.model_copy(update={"cache_views": views, "resolution": side})
        chosen = config.model_copy(update={"data": data, "model": config.model.model_copy(update={"tail": tail})})
        with suppress(UsageError):  # not every network can be built for every size
            size = cache_bytes(Trunk(configured_parts(chosen.model, side)), images, views, side)
            if size <= room:
                break
    what = f"{views} views per image at {side} px" + (", pooled to parts of a frozen network" * (tail == "adapter"))
    progress.say(f"cache: {what}, {size / 1e6:,.0f} MB; {room / 1e6:,.0f} MB are free for it")
    return chosen


def _image_size(config: TrainConfig, backbone: Backbone, shorter_side: int | None) -> dict[str, Any]:
    """Return the settings of the image size; what is not given is as the backbone was pretrained."""
    data = config.data
    useful = _MAX_ENLARGEMENT * shorter_side if shorter_side else backbone.size
    side = backbone.fitting(data.resolution or max(_MIN_SIDE, min(backbone.size, useful)))
    interpolation = backbone.interpolation if data.interpolation == "auto" else data.interpolation
    return {"resolution": side, "resize": data.resize or round(side / backbone.crop), "interpolation": interpolation}


def configured_parts(model: ModelConfig, resolution: int) -> TrunkParts:
    """Build the configured backbone with random weights."""
    return build_trunk(
        model.architecture or model.backbone,
        resolution=resolution,
        arguments=model.arguments,
        adapter=model.tail == "adapter",
    )


def initial_trunk(config: TrainConfig, *, weights: Path | None) -> tuple[TrunkParts, WeightsReport | None]:
    """Build the configured backbone with weights of a file or random weights, and their normalisation."""
    torch.manual_seed(config.optim.seed)  # also for the heads, which are built next
    parts = configured_parts(config.model, config.data.resolution)
    report = load_weights(parts, weights) if weights else None
    file = report.file if report else None
    mean = config.model.mean or (file and file.mean) or parts.mean
    std = config.model.std or (file and file.std) or parts.std
    return replace(parts, mean=mean, std=std), report


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
    if not _fits(wanted, found):
        found = _converted(found, parts.network)
    return wanted, found


def _fits(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> bool:
    return all(name in found and found[name].shape == tensor.shape for name, tensor in wanted.items())


def _converted(found: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors as timm converts them: other names, position embeddings of another image size."""
    convert = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return found
    try:
        converted: dict[str, Tensor] = convert(dict(found), network)
    except Exception:  # tensors of another network: they are listed as they are
        return found
    return converted


def _places(parts: TrunkParts) -> dict[str, str]:
    """Return the network's names of the tensors of trunk and tail, by their names in checkpoints of a run.

    An adapter is not part of the network: no file has its weights.
    """
    names = {id(tensor): name for name, tensor in parts.network.state_dict(keep_vars=True).items()}
    return {
        f"{prefix}.{name}": names[id(tensor)]
        for prefix, module in (("trunk.stages", parts.frozen), ("branches.0.tail", parts.tail))
        for name, tensor in module.state_dict(keep_vars=True).items()
        if id(tensor) in names
    }


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
    names = [*OWN, *ALIASES, "resnet18", "resnet50"]
    for name in names:
        if _fits(*_compare(build_trunk(name, resolution=224), file)):
            return f"use the backbone that the file fits: --backbone {name}"
    return f"name its backbone with --backbone, or use weights of one of {', '.join(names)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
