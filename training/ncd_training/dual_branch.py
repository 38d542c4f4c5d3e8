"""The model: a frozen trunk, and branches that each hold a copy of the last stage and two heads."""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ncd_training.modules import Modules
from ncd_training.trunk import TrunkParts

# Maps of convolutions have four dimensions, tokens of transformers three.
_FORMATS = {3: torch.contiguous_format, 4: torch.channels_last}


class BranchOutput(NamedTuple):
    """One branch's view of a batch."""

    parts: Tensor  # [B, d, h, w]
    embedding: Tensor  # [B, d]
    known_logits: Tensor  # [B, C_known]
    cluster_logits: Tensor  # [B, C_novel]


class Branch(nn.Module):
    """Projection and pooling (the tail), a known head and a cluster head."""

    def __init__(self, tail: nn.Module, dim: int, *, known: int, novel: int) -> None:
        super().__init__()
        self.tail = tail
        self.known_head = nn.Linear(dim, known)
        self.cluster_head = nn.Linear(dim, novel)

    def forward(self, maps: Tensor) -> BranchOutput:
        """Trunk maps to parts, embedding and both heads' logits."""
        parts, embedding = self.tail(maps)
        return BranchOutput(parts, embedding, self.known_head(embedding), self.cluster_head(embedding))

    def class_weights(self, output: BranchOutput, labels: Tensor) -> Tensor:
        """Head weights [B, d] of each image's class: the labelled ones' own, the others' likeliest cluster."""
        clusters = output.cluster_logits[len(labels) :].argmax(dim=1)
        return torch.cat([self.known_head.weight[labels], self.cluster_head.weight[clusters]])


class Trunk(nn.Module):
    """Normalisation and the frozen stages. Stays in eval mode, so its output for an image never changes."""

    mean: Tensor
    std: Tensor

    def __init__(self, parts: TrunkParts) -> None:
        super().__init__()
        self.stages = parts.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(parts.mean).view(1, 3, 1, 1) * 255.0)
        self.register_buffer("std", torch.tensor(parts.std).view(1, 3, 1, 1) * 255.0)
        self.eval()

    def train(self, mode: bool = True) -> Trunk:
        """Ignore `mode`: a frozen trunk whose batch norm drifts is not frozen."""
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images [B, 3, H, W] to maps."""
        return self.stages((images.float() - self.mean) / self.std)


class DualBranchModel(nn.Module):
    """The trunk and its branches. The first branch is the one that is exported and served."""

    def __init__(self, parts: TrunkParts, *, branches: int, known: int, novel: int) -> None:
        super().__init__()
        self.dim = parts.dim
        self.trunk = Trunk(parts)
        self.branches: Modules[Branch] = Modules(
            Branch(deepcopy(parts.tail), parts.dim, known=known, novel=novel) for _ in range(branches)
        )

    def placed(self, inputs: Tensor) -> Tensor:
        """Inputs on the model's device, in the memory format that convolutions like best."""
        return inputs.to(self.trunk.mean.device).contiguous(memory_format=_FORMATS[inputs.dim()])

    def to_maps(self, inputs: Tensor) -> Tensor:
        """Images (uint8) through the frozen trunk; cached trunk maps as they are."""
        if inputs.dtype != torch.uint8:
            return inputs
        with torch.no_grad():
            return self.trunk(inputs)

    def forward(self, maps: Tensor) -> list[BranchOutput]:
        """Trunk maps to one output for each branch."""
        return [branch(maps) for branch in self.branches]
