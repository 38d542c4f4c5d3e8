"""Backbones by name: networks of timm, of a hub or a folder, and two of our own for small images."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ncd_serve.errors import DataError, UsageError
from ncd_training.base.vision import timm
from ncd_training.model.cut import cut_network
from ncd_training.model.networks import CifarResNet, SmallResNet
from ncd_training.model.trunk import IMAGENET_MEAN, IMAGENET_STD, Channels, ConvTail, TrunkParts

# Short names for networks of timm.
ALIASES = {"efficientnet_lite0": "tf_efficientnet_lite0", "vit_small": "vit_small_patch16_224"}
_LARGE_SIZE, _USUAL_SIZE = 384, 224  # a network pretrained on larger images than the first gets the second
_SAFE_FILES = {"open_clip_pytorch_model.bin": "open_clip_model.safetensors"}  # others: see _safe_file


@dataclass(frozen=True)
class Backbone:
    """Network by its public name: architecture, preprocessing, and where its weights come from."""

    name: str
    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    size: int = _USUAL_SIZE
    crop: float = 0.875  # side of the crop, as a fraction of the resized image
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD
    fixed_size: bool = False
    licence: str | None = None
    # Origin of the weights: a repository of the hub with a revision and the name of a file, a folder, or an address.
    repository: str | None = None
    revision: str | None = None
    filename: str = "model.safetensors"
    folder: Path | None = None
    url: str | None = None

    @property
    def is_own(self) -> bool:
        """True for networks that nobody publishes weights for."""
        return self.architecture in OWN

    def fitting(self, resolution: int) -> int:
        """Return the nearest size to `resolution` that the network can be built for: a multiple of its patch size."""
        patch = re.search(r"patch(\d+)", self.architecture)
        step = int(patch[1]) if patch else 1
        return max(step, round(resolution / step) * step)


def find_backbone(name: str, *, read_config: Callable[[str, str | None], Path] | None = None) -> Backbone:
    """Return the backbone of a name: own, `NAME`, `timm/NAME`, `hf-hub:OWNER/NAME@REVISION` or `local-dir:PATH`.

    `read_config` returns the file config.json of a repository and revision of the hub.
    """
    short = name.removeprefix("timm/")
    if short in OWN:
        return Backbone(name, short, size=32, crop=1.0)
    source, _, rest = name.partition(":")
    if source == "local-dir":
        folder = Path(rest).absolute()
        return replace(_described(name, folder / "config.json"), folder=folder)
    if source == "hf-hub":
        assert read_config is not None
        repository, _, revision = rest.partition("@")
        found = _described(name, read_config(repository, revision or None))
        return replace(found, repository=repository, revision=revision or None)
    return _registered(name, ALIASES.get(short, short))


def _registered(name: str, architecture: str) -> Backbone:
    """Return a backbone of timm's own list."""
    if not timm.is_model(architecture):
        raise UsageError(f"unknown backbone '{name}'", hint=_near(architecture))
    try:
        facts = timm.get_pretrained_cfg(architecture)
    except RuntimeError:
        raise UsageError(f"{name}: there are no such weights of this network", hint=_near(architecture)) from None
    return _backbone(name, architecture, facts.to_dict() if facts else {})


def _described(name: str, file: Path) -> Backbone:
    """Return the backbone that a file config.json in timm's format describes."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        architecture, facts = content["architecture"], content.get("pretrained_cfg", content)
        arguments = dict(content.get("model_args", {}))
        known = timm.is_model(architecture)
    except OSError:
        raise DataError(
            f"{file} cannot be read", hint="a folder of timm has config.json and model.safetensors"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{file} does not describe a network of timm", hint="it needs the key 'architecture'") from None
    if not known:
        raise DataError(f"{file}: this timm has no network '{architecture}'", hint="update timm, or choose another")
    return replace(_backbone(name, architecture, facts), arguments=arguments)


def _backbone(name: str, architecture: str, facts: dict[str, Any]) -> Backbone:
    channels, side = (facts.get("input_size") or (3, _USUAL_SIZE))[:2]
    if channels != 3:
        raise UsageError(f"{name} takes images of {channels} channels", hint="choose a backbone for RGB images")
    found = Backbone(
        name,
        architecture,
        size=side,
        crop=facts.get("crop_pct") or 1.0,
        interpolation="bicubic" if facts.get("interpolation") == "bicubic" else "bilinear",
        mean=tuple(facts.get("mean") or IMAGENET_MEAN),
        std=tuple(facts.get("std") or IMAGENET_STD),
        fixed_size=bool(facts.get("fixed_input_size")),
        licence=facts.get("license"),
        repository=_repository(architecture, facts),
        filename=_safe_file(facts.get("hf_hub_filename")),
        url=facts.get("url"),
    )
    return replace(found, size=found.fitting(side if side <= _LARGE_SIZE else _USUAL_SIZE))


def _repository(architecture: str, facts: dict[str, Any]) -> str | None:
    """Return the repository; timm's list has `timm/` for one that is named like the network."""
    repository: str | None = facts.get("hf_hub_id")
    if repository and repository.endswith("/"):
        return repository + ".".join(filter(None, [facts.get("architecture") or architecture, facts.get("tag")]))
    return repository


def _safe_file(filename: str | None) -> str:
    """Return the name of the safetensors file that stands beside a pickled one."""
    if filename is None:
        return Backbone.filename
    return _SAFE_FILES.get(filename, re.sub(r"\.(bin|pth|pt)$", ".safetensors", filename))


def _near(architecture: str) -> str:
    names = get_close_matches(architecture, [*OWN, *ALIASES, *timm.list_models(), *timm.list_pretrained()], n=3)
    if names:
        return f"did you mean {' or '.join(names)}?"
    return "`ncd-serve backbones PATTERN` lists names, e.g. ncd-serve backbones '*dinov2*'"


def build_trunk(
    name: str, *, resolution: int, arguments: dict[str, Any] | None = None, adapter: bool = False
) -> TrunkParts:
    """Build a network by its architecture with random weights, cut for images of `resolution` px.

    `adapter`: freeze it whole and train an adapter instead of its last stage.
    """
    backbone = find_backbone(name)
    if backbone.is_own:
        return OWN[backbone.architecture]()
    # Position embeddings are made for the resolution, so that an exported graph resamples none.
    needed = {"num_classes": 0, **({"img_size": resolution} if backbone.fixed_size else {})}
    try:
        network = timm.create_model(backbone.architecture, pretrained=False, **{**(arguments or {}), **needed})
        parts = cut_network(network, resolution=resolution, adapter=adapter)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise UsageError(
            f"{backbone.name} cannot be built for images of {resolution} px: {error}",
            hint=f"--set data.resolution={backbone.size} is its own size",
        ) from None
    return replace(parts, mean=backbone.mean, std=backbone.std)


def _small_resnet() -> TrunkParts:
    net = SmallResNet()
    frozen = nn.Sequential(net.stem, net.layer1, net.layer2)
    return TrunkParts(net, frozen, ConvTail(net.layer3), net.dim, cut="trained from layer3 on")


def _cifar_resnet18() -> TrunkParts:
    net = CifarResNet()
    frozen = nn.Sequential(net.conv1, net.bn1, net.relu, net.layer1, net.layer2, net.layer3)
    return TrunkParts(net, frozen, ConvTail(net.layer4), 512, cut="trained from layer4 on")


OWN: dict[str, Callable[[], TrunkParts]] = {"small_resnet": _small_resnet, "cifar_resnet18": _cifar_resnet18}
