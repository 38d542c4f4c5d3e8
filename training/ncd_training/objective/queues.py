"""First-in-first-out memories: the part dictionary and the feature banks. All state is in buffers, so it is saved."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ncd_training.model.branches import Modules


class FifoQueue(nn.Module):
    """Ring buffer of vectors [size, dim]. Any number may be pushed at a time; slots not yet filled are never read."""

    vectors: Tensor
    pushed: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("vectors", torch.zeros(size, dim))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def push(self, vectors: Tensor) -> None:
        """Store `vectors` [n, dim] over the oldest ones; of more than `size`, the last `size` stay."""
        slots = (self.pushed + torch.arange(len(vectors), device=vectors.device)) % self.size
        newest = slice(-self.size, None)
        self.vectors[slots[newest]] = vectors[newest].to(self.vectors.dtype)
        self.pushed += len(vectors)

    @property
    def filled(self) -> Tensor:
        """The vectors stored so far, [min(pushed, size), dim]."""
        return self.vectors[: min(int(self.pushed), self.size)]


class FeatureBanks(nn.Module):
    """One bank for each branch. Slot j of all of them holds the same image, because they are pushed together."""

    def __init__(self, size: int, dim: int, *, branches: int) -> None:
        super().__init__()
        self.queues: Modules[FifoQueue] = Modules(FifoQueue(size, dim) for _ in range(branches))

    def push(self, features: list[Tensor]) -> None:
        """Store the same images' features, one tensor [n, dim] for each branch."""
        assert len({len(rows) for rows in features}) == 1, "banks must move in lockstep"
        for queue, rows in zip(self.queues, features, strict=True):
            queue.push(rows.detach())

    @property
    def filled(self) -> list[Tensor]:
        """What each bank holds, in the branches' order."""
        return [queue.filled for queue in self.queues]


class PartDictionary(FifoQueue):
    """Part features V (Eq. 4). An image is described by how its parts spread over the dictionary."""

    spread: Tensor

    def __init__(self, size: int, dim: int, *, sharpness: float = 15.0, momentum: float = 0.99) -> None:
        super().__init__(size, dim)
        self.sharpness = sharpness
        self.momentum = momentum
        # Running mean distance of a part to its nearest entry, 0 before the first: the softmax adapts to it.
        self.register_buffer("spread", torch.zeros(()))

    @torch.no_grad()
    def describe(self, part_maps: Tensor) -> Tensor:
        """Part maps [B, d, h, w] to descriptions o [B, filled], each a distribution over the filled entries.

        Each location is softly assigned by squared distance, then locations are averaged. A linear similarity would
        commute with the average, and the description would know nothing about parts.
        """
        batch, dim, height, width = part_maps.shape
        parts = part_maps.permute(0, 2, 3, 1).reshape(-1, dim)
        distances = torch.cdist(parts, self.filled).square_()
        self._follow(distances.amin(dim=1).mean())
        assignment = torch.softmax(-self.sharpness / self.spread.clamp_min(1e-12) * distances, dim=1)
        return assignment.view(batch, height * width, -1).mean(dim=1)

    def _follow(self, nearest: Tensor) -> None:
        if self.training or self.spread == 0:
            self.spread.lerp_(nearest, 1.0 if self.spread == 0 else 1.0 - self.momentum)
