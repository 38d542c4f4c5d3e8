"""List of backbones: size, licence, whether weights are at hand, and speed on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ncd_serve.errors import NcdError, UsageError
from ncd_training.base.vision import timm
from ncd_training.model.backbone import ALIASES, OWN, Backbone, build_trunk, find_backbone
from ncd_training.model.hub import at_hand, restriction

if TYPE_CHECKING:
    from ncd_serve.progress import Progress

# Shown without a pattern: small enough for a CPU, or the networks of the field's tables.
RECOMMENDED = (
    "efficientnet_lite0",
    "mobilenetv4_conv_small",
    "resnet18",
    "resnet50",
    "convnext_tiny",
    "swin_tiny_patch4_window7_224",
    "vit_small_patch16_224.dino",
    "vit_small_patch14_reg4_dinov2.lvd142m",
    "vit_base_patch14_reg4_dinov2.lvd142m",
    "vit_small_patch16_dinov3.lvd1689m",
    "vit_base_patch16_siglip_224.v2_webli",
    *OWN,
)
_MAX_ROWS = 80
_TIMED_IMAGES = 4


@dataclass(frozen=True)
class BackboneRow:
    """Row of the list."""

    name: str
    weights: int  # number of them
    size: int  # px of the images that it was pretrained with
    licence: str
    restricted: bool
    origin: str  # yes, or where weights can be had
    images_per_second: float | None = None
    cut: str = ""


def list_backbones(pattern: str | None, *, measure: bool, progress: Progress) -> tuple[list[BackboneRow], int]:
    """Return rows of the names that match, at most 80, and how many more match; without a pattern, a selection."""
    names = list(RECOMMENDED) if pattern is None else _matching(pattern)
    if not names:
        raise UsageError(f"no backbone matches '{pattern}'", hint="put * around a part of the name, e.g. '*dinov2*'")
    rows = list(_rows(names[:_MAX_ROWS]))
    if measure:
        rows = [_measured(row) for row in progress.track(rows, "measuring", len(rows))]
    return rows, max(0, len(names) - _MAX_ROWS)


def _matching(pattern: str) -> list[str]:
    pattern = pattern.removeprefix("timm/")
    wanted = pattern if "*" in pattern or "?" in pattern else f"*{pattern}*"
    own = [name for name in (*OWN, *ALIASES) if pattern.strip("*") in name]
    return [*own, *timm.list_models(wanted, pretrained=True)]


def _rows(names: Iterable[str]) -> Iterator[BackboneRow]:
    for name in names:
        backbone = find_backbone(name)
        restricted = restriction(backbone.licence) is not None
        yield BackboneRow(name, _count(backbone), backbone.size, backbone.licence or "", restricted, _origin(backbone))


def _origin(backbone: Backbone) -> str:
    if backbone.is_own:
        return "pretrain"
    if at_hand(backbone):
        return "yes"
    return "hub" if backbone.repository else "no"


def _count(backbone: Backbone) -> int:
    """Return the number of weights, without allocating them."""
    with torch.device("meta"):
        if backbone.is_own:
            network = OWN[backbone.architecture]().network
        else:
            network = timm.create_model(backbone.architecture, num_classes=0)
    return sum(weight.numel() for weight in network.parameters())


@torch.no_grad()
def _measured(row: BackboneRow) -> BackboneRow:
    """Return the row with the speed of the whole network in torch, and where it is cut."""
    try:
        parts = build_trunk(row.name, resolution=row.size)
    except NcdError as error:
        return replace(row, cut=str(error))
    images = torch.zeros(_TIMED_IMAGES, 3, row.size, row.size)
    start = time.perf_counter()
    parts.tail.eval()(parts.frozen.eval()(images))
    return replace(row, images_per_second=_TIMED_IMAGES / (time.perf_counter() - start), cut=parts.cut)
