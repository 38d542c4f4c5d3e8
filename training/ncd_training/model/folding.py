"""Batch norm as part of the 1x1 convolution before it, while branches are trained on a CPU.

There, most of a step's time is spent on passes over wide maps, not on arithmetic, and a batch norm makes seven of them.
Mean and covariance of the convolution's narrower input give mean and variance of its output, so that the convolution
can have normalising weights, and the batch norm nothing left to do. The same numbers, up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ncd_training.base.distributed import ReplacedNorm
from ncd_training.model.trunk import ConvTail


class FoldedNorm(ReplacedNorm, nn.BatchNorm2d):
    """Batch norm that the convolution before it has computed, while training."""

    def forward(self, maps: Tensor) -> Tensor:
        """Return normalised maps, after the activation if there is one."""
        return self.after(maps if self.training else super().forward(maps))


class NormalisingConv(nn.Conv2d):
    """1x1 convolution that computes the batch norm after it, too, while training."""

    def __init__(self, convolution: nn.Conv2d, norm: FoldedNorm) -> None:
        super().__init__(convolution.in_channels, convolution.out_channels, 1, bias=False, device="meta")
        self.weight = convolution.weight
        self._norm = (norm,)  # in a tuple, or its weights would have a second name in checkpoints
        self.train(norm.training)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the maps [B, C, h, w] of maps [B, c, h, w], normalised while training."""
        if not self.training:
            return super().forward(maps)
        (norm,), weight = self._norm, self.weight.flatten(1)
        places = maps.permute(0, 2, 3, 1).flatten(0, 2)
        mean = places.mean(dim=0)
        centred = places - mean
        covariance = centred.T @ centred / len(places)
        variance = ((weight @ covariance) * weight).sum(dim=1)
        norm.update_statistics((weight @ mean).detach().float(), variance.detach().float(), len(places))
        weight = weight * (norm.weight * (variance + norm.eps).rsqrt()).unsqueeze(1)
        return F.conv2d(maps, weight[..., None, None], norm.bias - weight @ mean)


def fold_norms(tail: nn.Module) -> None:
    """Let each 1x1 convolution that widens a tail's maps compute the batch norm after it; names and weights stay."""
    if isinstance(tail, ConvTail):
        for (name, convolution), (norm_name, norm) in _pairs(tail.stages):
            folded = FoldedNorm(norm)
            tail.stages.set_submodule(name, NormalisingConv(convolution, folded))
            tail.stages.set_submodule(norm_name, folded)


class _Layers(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Conv2d | nn.BatchNorm2d) or super().is_leaf_module(module, name)


def _pairs(stages: nn.Module) -> Iterator[tuple[tuple[str, nn.Conv2d], tuple[str, nn.BatchNorm2d]]]:
    """Yield convolutions and batch norms that can be computed at once, with their names."""
    try:
        graph = _Layers().trace(stages)
    except Exception:  # a network of another kind may raise anything
        return
    modules, calls = dict(stages.named_modules()), Counter(node.target for node in graph.nodes)
    for node in graph.nodes:
        after = next(iter(node.users), node)
        convolution, norm = modules.get(node.target), modules.get(after.target)
        alone = len(node.users) == calls[node.target] == calls[after.target] == 1
        if alone and isinstance(norm, nn.BatchNorm2d) and type(convolution) is nn.Conv2d and _widens(convolution):
            yield (node.target, convolution), (after.target, norm)


def _widens(module: nn.Conv2d) -> bool:
    """Return True for a 1x1 convolution with more channels in its output than in its input."""
    return (
        (module.kernel_size, module.stride, module.padding, module.groups) == ((1, 1), (1, 1), (0, 0), 1)
        and module.bias is None
        and module.out_channels > module.in_channels
    )
