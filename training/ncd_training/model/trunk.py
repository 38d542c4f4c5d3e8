"""Parts of a backbone: the frozen trunk, and the tail, its last stage, of which every branch has a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Channels = tuple[float, float, float]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class TailOutput(NamedTuple):
    """Output of a tail: `parts` [B, d, h, w] and the pooled `embedding` [B, d], neither of them negative.

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
    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD
    cut: str = ""  # in words, for the plan


class Tail(nn.Module):
    """Last stage of a backbone. Without `with_parts`, a tail need not compute parts and may return 0 x 0 of them."""

    with_parts = True

    @torch.no_grad()
    def describe(self, maps: Tensor) -> Tensor:
        """Return the features [B, d] that images are clustered by before training; the embedding, unless overridden."""
        output: TailOutput = self(maps)
        return output.embedding

    def mean_of(self, maps: Tensor) -> Tensor:
        """Return the mean [B, c] over the places of trunk maps [B, c, H, W], or over tokens [B, L, c]."""
        return maps.mean(dim=1) if maps.dim() == 3 else maps.mean(dim=(2, 3))


class ConvTail(Tail):
    """Last stage of a convolutional network; parts are the locations of its map, the embedding is their mean."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)

    def forward(self, maps: Tensor) -> TailOutput:
        """Return parts and embedding of trunk maps [B, c, H, W]."""
        parts = self.stages(maps)
        # A sum's gradient is a view; a mean's would be a tensor as large as the parts.
        return TailOutput(parts, parts.sum(dim=(2, 3)) / parts[0, 0].numel())

    @torch.no_grad()
    def describe(self, maps: Tensor) -> Tensor:
        """Return the cubic mean of the parts."""
        return cubic_mean(self.stages(maps))


class PooledTail(Tail):
    """Last stage of any network, with the network's own pooling and with its own layout of features.

    Ranking statistics compare the largest entries, so features must not be negative: signed ones pass a ReLU.
    """

    def __init__(self, stages: nn.Sequential, pool: nn.Module, layout: Layout, *, signed: bool = False) -> None:
        super().__init__()
        self.stages, self.pool, self.layout, self.signed = stages, pool, layout, signed

    def forward(self, maps: Tensor) -> TailOutput:
        """Return parts and embedding of the trunk's output."""
        features = self.stages(maps)
        embedding = self._positive(self.pool(features))
        if not self.with_parts:
            return TailOutput(no_parts(embedding), embedding)
        with torch.no_grad():
            return TailOutput(self._positive(self.parts(features.detach())), embedding)

    @torch.no_grad()
    def describe(self, maps: Tensor) -> Tensor:
        """Return the cubic mean of the parts of a convolutional network, the embedding of others."""
        if self.signed or self.layout.pool_each or self.layout.kind == "NLC":
            return super().describe(maps)
        return cubic_mean(self.layout.to_map(self.stages(maps)))

    def mean_of(self, maps: Tensor) -> Tensor:
        """Return the mean [B, c] over the places of trunk maps."""
        last = self.layout.kind == "NHWC" and maps.dim() == 4
        return maps.mean(dim=(1, 2)) if last else super().mean_of(maps)

    def parts(self, features: Tensor) -> Tensor:
        """Return parts [B, d, h, w]; layers after the pooling are applied to each location alone."""
        if not self.layout.pool_each:
            return self.layout.to_map(features)
        spots = self.layout.to_map(features).permute(0, 2, 3, 1)
        alone = spots.flatten(0, 2)[(..., None, None) if self.layout.kind == "NCHW" else (slice(None), None, None)]
        return self.pool(alone).unflatten(0, spots.shape[:3]).permute(0, 3, 1, 2)

    def _positive(self, features: Tensor) -> Tensor:
        return torch.relu(features) if self.signed else features


@dataclass(frozen=True)
class Layout:
    """Layout of a network's features: NCHW, NHWC, or tokens NLC, of which the first `prefix` are no parts."""

    kind: str
    grid: tuple[int, int]
    prefix: int = 0
    pool_each: bool = False  # parts get the features' own width, or meaning, only in the pooling's layers

    def to_map(self, features: Tensor) -> Tensor:
        """Return features as maps [B, c, h, w], without prefix tokens."""
        if self.kind == "NLC":
            return features[:, self.prefix :].transpose(1, 2).unflatten(2, self.grid)
        return features if self.kind == "NCHW" else features.permute(0, 3, 1, 2)


class ClassTokenTail(Tail):
    """Last block of a vision transformer: patch tokens are the parts, the class token is the embedding.

    The result is that of `PooledTail`, for less work: only the class token passes the block with a gradient.
    """

    def __init__(self, block: Any, norm: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.block, self.norm, self.layout = block, norm, layout

    def forward(self, tokens: Tensor) -> TailOutput:
        """Return parts and embedding of tokens [B, prefix + h*w, d]."""
        normed = self.block.norm1(tokens)
        keys, values = self._project(normed, slice(tokens.shape[2], None))
        embedding = self._features(tokens[:, :1], normed[:, :1], keys, values)[:, 0]
        if not self.with_parts:
            return TailOutput(no_parts(embedding), embedding)
        # Patch tokens influence the embedding only as keys and values, and no loss term depends on the parts.
        patches = slice(self.layout.prefix, None)
        with torch.no_grad():
            parts = self._features(tokens[:, patches], normed[:, patches], keys, values)
        return TailOutput(parts.transpose(1, 2).unflatten(2, self.layout.grid), embedding)

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


class AdapterTail(Tail):
    """Trained layers after a network that is frozen whole. They start as the identity.

    Their input is the network's embedding and its pooled parts, as tokens [B, 1 + h*w, d].
    """

    HIDDEN = 512

    def __init__(self, dim: int, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        last = nn.Linear(self.HIDDEN, dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.change = nn.Sequential(nn.Linear(dim, self.HIDDEN), nn.ReLU(), last)

    def forward(self, tokens: Tensor) -> TailOutput:
        """Return parts and embedding."""
        adapted = torch.relu(tokens + self.change(tokens))
        return TailOutput(self.layout.to_map(adapted), adapted[:, 0])


def cubic_mean(parts: Tensor) -> Tensor:
    """Return the cubic mean of parts [B, d, h, w], none negative: strong features of a few parts count more.

    On known classes of CUB played as novel, linked clusters find 0.02 to 0.07 more than with the mean, see
    benchmarks/descriptions.py.
    """
    return parts.flatten(2).pow(3).mean(dim=2).pow(1 / 3)


def no_parts(embedding: Tensor) -> Tensor:
    """Return maps of 0 x 0 parts [B, d, 0, 0]."""
    return embedding[..., None, None][..., :0, :0]
