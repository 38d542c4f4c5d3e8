"""Networks for small images, which timm does not have; they train from random weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
