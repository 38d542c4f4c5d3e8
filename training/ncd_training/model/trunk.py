"""Backbones, each cut into a frozen trunk and a tail: the last stage, of which every branch has a copy.

A new backbone is one small function with a line in `TRUNKS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_serve.errors import UsageError, did_you_mean
from ncd_training.base.vision import timm, torchvision

if TYPE_CHECKING:
    from collections.abc import Callable


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class TailOutput(NamedTuple):
    """Output of a tail: `parts` [B, d, h, w] and the pooled `embedding` [B, d].

    Gradients flow through the embedding; parts are only compared, which needs no gradient.
    """

    parts: Tensor
    embedding: Tensor


@dataclass(frozen=True)
class TrunkParts:
    """Backbone cut in two, and the normalisation of its images.

    `network` is the uncut backbone: the same modules under their names in weight files.
    """

    network: nn.Module
    frozen: nn.Module
    tail: Tail
    dim: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD


class Tail(nn.Module):
    """Last stage of a backbone. Without `with_parts`, a tail need not compute parts and may return 0 x 0 of them."""

    with_parts = True


class ConvTail(Tail):
    """Last stage of a convolutional network; parts are the locations of its map, the embedding is their mean."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)

    def forward(self, maps: Tensor) -> TailOutput:
        """Return parts and embedding of trunk maps [B, c, H, W]."""
        parts = self.stages(maps)
        return TailOutput(parts, parts.mean(dim=(2, 3)))


class TransformerTrunk(nn.Module):
    """Vision transformer of timm up to its last block: images to tokens [B, 1 + h*w, d]."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = nn.ModuleDict({"patch_embed": vit.patch_embed, "norm_pre": vit.norm_pre})
        self.blocks = nn.Sequential(*list(vit.blocks)[:-1])
        self.cls_token, self.pos_embed = vit.cls_token, vit.pos_embed

    def forward(self, images: Tensor) -> Tensor:
        """Return the tokens of images [B, 3, H, W], the class token first."""
        patches = self.vit["patch_embed"](images)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed
        return self.blocks(self.vit["norm_pre"](tokens))


class TransformerTail(Tail):
    """Last block of a vision transformer: patch tokens are the parts, the class token is the embedding.

    Ranking statistics compare the largest entries, so features must not be negative: both pass a ReLU.
    """

    def __init__(self, block: Any, norm: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.block, self.norm, self.grid = block, norm, grid

    def forward(self, tokens: Tensor) -> TailOutput:
        """Return parts and embedding of tokens [B, 1 + h*w, d]."""
        normed = self.block.norm1(tokens)
        keys, values = self._project(normed, slice(tokens.shape[2], None))
        embedding = self._features(tokens[:, :1], normed[:, :1], keys, values)[:, 0]
        if not self.with_parts:
            return TailOutput(embedding[..., None, None][..., :0, :0], embedding)
        # Patch tokens influence the embedding only as keys and values, and no loss term depends on the parts.
        with torch.no_grad():
            parts = self._features(tokens[:, 1:], normed[:, 1:], keys, values)
        return TailOutput(parts.transpose(1, 2).unflatten(2, self.grid), embedding)

    def _features(self, tokens: Tensor, normed: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return some tokens [B, n, d] after the block, in which they attend to all tokens."""
        block, (queries,) = self.block, self._project(normed, slice(tokens.shape[2]))
        seen = F.scaled_dot_product_attention(queries, keys, values)
        mixed = tokens + block.ls1(block.attn.proj(seen.transpose(1, 2).flatten(2)))
        return torch.relu(self.norm(mixed + block.ls2(block.mlp(block.norm2(mixed)))))

    def _project(self, normed: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """Return queries, keys or values of the tokens, [B, heads, n, d / heads] each, from `rows` of the weights."""
        attention = self.block.attn
        projected = F.linear(normed, attention.qkv.weight[rows], attention.qkv.bias[rows])
        return projected.unflatten(2, (-1, attention.num_heads, attention.head_dim)).permute(2, 0, 3, 1, 4).unbind()


def _small_resnet(_resolution: int) -> TrunkParts:
    """Build a network for images of about 32 px, which trains from random weights in a minute on a CPU."""
    net = SmallResNet()
    return TrunkParts(net, nn.Sequential(net.stem, net.layer1, net.layer2), ConvTail(net.layer3), net.dim)


def _cifar_resnet18(_resolution: int) -> TrunkParts:
    net = CifarResNet()
    frozen = nn.Sequential(net.conv1, net.bn1, net.relu, net.layer1, net.layer2, net.layer3)
    return TrunkParts(net, frozen, ConvTail(net.layer4), 512)


def _torchvision_resnet(name: str) -> Callable[[int], TrunkParts]:
    def build(_resolution: int) -> TrunkParts:
        net: Any = getattr(torchvision.models, name)(weights=None)
        stem = (net.conv1, net.bn1, net.relu, net.maxpool)
        frozen = nn.Sequential(*stem, net.layer1, net.layer2, net.layer3)
        return TrunkParts(net, frozen, ConvTail(net.layer4), net.fc.in_features)

    return build


def _efficientnet_lite0(_resolution: int) -> TrunkParts:
    net: Any = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    frozen = nn.Sequential(net.conv_stem, net.bn1, *net.blocks[:-1])
    tail = ConvTail(net.blocks[-1], net.conv_head, net.bn2)
    return TrunkParts(net, frozen, tail, net.num_features, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def _vit_small(resolution: int) -> TrunkParts:
    net: Any = timm.create_model("vit_small_patch16_224", pretrained=False, img_size=resolution)
    tail = TransformerTail(net.blocks[-1], net.norm, net.patch_embed.grid_size)
    return TrunkParts(net, TransformerTrunk(net), tail, net.embed_dim)


TRUNKS: dict[str, Callable[[int], TrunkParts]] = {
    "small_resnet": _small_resnet,
    "cifar_resnet18": _cifar_resnet18,
    "resnet18": _torchvision_resnet("resnet18"),
    "resnet50": _torchvision_resnet("resnet50"),
    "efficientnet_lite0": _efficientnet_lite0,
    "vit_small": _vit_small,
}


def build_trunk(name: str, *, resolution: int) -> TrunkParts:
    """Build the named backbone with random weights, cut for images of `resolution` px."""
    if name not in TRUNKS:
        raise UsageError(f"model.trunk: unknown backbone '{name}'", hint=did_you_mean(name, TRUNKS))
    return TRUNKS[name](resolution)


class Block(nn.Module):
    """Residual block: two 3x3 convolutions, and a shortcut of average pooling with zeros for additional channels."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.stride, self.extra = stride, width - width_in
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, maps: Tensor) -> Tensor:
        """Return non-negative maps [B, width, H / stride, W / stride] of maps [B, width_in, H, W]."""
        shortcut = F.avg_pool2d(maps, self.stride) if self.stride > 1 else maps
        if self.extra:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.extra))
        residual = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(maps)))))
        return torch.relu(shortcut + residual)


def _convolution(width_in: int, width: int, size: int) -> nn.Sequential:
    convolution = nn.Conv2d(width_in, width, size, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class SmallResNet(nn.Module):
    """Residual network of three stages that halve the map: 32 px images end as 4x4 maps.

    A 1x1 convolution widens the last stage to 512 features, as in ResNet-18: with few features the top-k sets of
    different classes overlap so much that ranking statistics cannot tell the classes apart.
    """

    dim = 512

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 3)
        self.layer1 = Block(width, 2 * width, 2)
        self.layer2 = Block(2 * width, 4 * width, 2)
        self.layer3 = nn.Sequential(Block(4 * width, 8 * width, 2), _convolution(8 * width, self.dim, 1))


class CifarResNet(nn.Module):
    """ResNet-18 as RankStat uses it on CIFAR: blocks [2, 2, 2, 2] of 64 to 512 channels, named as in its files."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = _convolution(3, 64, 3)
        self.layer1 = nn.Sequential(Block(64, 64), Block(64, 64))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512))
