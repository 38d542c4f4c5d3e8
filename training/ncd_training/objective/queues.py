"""First-in-first-out memories: the part dictionary and the feature banks. Checkpoints hold all of their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ncd_training.model.branches import Modules


class FifoQueue(nn.Module):
    """Ring buffer of vectors [size, dim]. Any number may be pushed at a time; slots not yet filled are never read."""

    vectors: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("vectors", torch.zeros(size, dim))
        # On the host: to read it from a GPU would wait for all that the GPU has yet to do.
        self.pushed = 0

    @torch.no_grad()
    def push(self, vectors: Tensor) -> None:
        """Store `vectors` [n, dim] over the oldest ones; of more than `size`, the last `size` stay.

        Vectors that are not finite, which float16 may lead to, leave their slots as they were.
        """
        slots = torch.arange(self.pushed, self.pushed + len(vectors), device=vectors.device)[-self.size :] % self.size
        newest = vectors[-self.size :].to(self.vectors.dtype)
        self.vectors[slots] = torch.where(newest.isfinite().all(dim=1, keepdim=True), newest, self.vectors[slots])
        self.pushed += len(vectors)

    @property
    def filled(self) -> Tensor:
        """The vectors stored so far, [min(pushed, size), dim]."""
        return self.vectors[: min(self.pushed, self.size)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the number of pushed vectors as if it were a buffer."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}pushed"] = torch.tensor(self.pushed, device=self.vectors.device)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        pushed = state_dict.pop(f"{prefix}pushed", None)
        if pushed is None:
            missing.append(f"{prefix}pushed")
        else:
            self.pushed = int(pushed)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)


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
        """Move the spread towards a batch's mean distance, which is taken as it is when it is the first."""
        later = self.spread.lerp(nearest, 1.0 - self.momentum) if self.training else self.spread
        followed = torch.where(self.spread == 0, nearest, later)
        # Chosen by tensor arithmetic, because an `if` would wait for the GPU.
        self.spread.copy_(torch.where(nearest.isfinite(), followed, self.spread))
