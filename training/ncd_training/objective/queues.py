"""First-in-first-out memories: the part dictionary and the feature banks. Checkpoints hold all of their state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.config.schema import PartSimilarity
from ncd_training.model.branches import Modules

# Factor of a distance, in units of a part's mean distance to its nearest entry. The first was chosen on known classes.
_SHARPNESS: dict[PartSimilarity, float] = {"cosine": 2.0, "euclidean": 15.0}


class FifoQueue(nn.Module):
    """Ring buffer of vectors [size, dim]. Any number may be pushed at a time; empty slots are never read."""

    vectors: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("vectors", torch.zeros(size, dim))
        # On the host: reading it from a GPU would wait for all queued work of the GPU.
        self.pushed = 0

    @torch.no_grad()
    def push(self, vectors: Tensor) -> None:
        """Overwrite the oldest vectors by `vectors` [n, dim]; of more than `size`, the last `size` stay.

        Vectors that are not finite (possible in float16) are skipped: their slots keep the old vectors.
        """
        slots = torch.arange(self.pushed, self.pushed + len(vectors), device=vectors.device)[-self.size :] % self.size
        newest = vectors[-self.size :].to(self.vectors.dtype)
        self.vectors[slots] = torch.where(newest.isfinite().all(dim=1, keepdim=True), newest, self.vectors[slots])
        self.pushed += len(vectors)

    @property
    def filled(self) -> Tensor:
        """Vectors stored so far, [min(pushed, size), dim]."""
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
    """Feature banks, one for each branch. Slot j of all banks holds the same image, because all are pushed together."""

    def __init__(self, size: int, dim: int, *, branches: int) -> None:
        super().__init__()
        self.queues: Modules[FifoQueue] = Modules(FifoQueue(size, dim) for _ in range(branches))

    def push(self, features: list[Tensor]) -> None:
        """Store features of the same images in all banks: one tensor [n, dim] for each branch."""
        assert len({len(rows) for rows in features}) == 1, "all banks must get the same number of images"
        for queue, rows in zip(self.queues, features, strict=True):
            queue.push(rows.detach())

    @property
    def filled(self) -> list[Tensor]:
        """Vectors of each bank, in the order of the branches."""
        return [queue.filled for queue in self.queues]


class PartDictionary(FifoQueue):
    """Dictionary of part features V (Eq. 4). An image is described by the distribution of its parts over them.

    The paper leaves the similarity open. By Euclidean distance, as in the released code, parts of small norm (plain
    background) are near every part: most images then share most of their best entries. Directions have no such hubs.
    """

    spread: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        similarity: PartSimilarity = "cosine",
        sharpness: float | None = None,
        momentum: float = 0.99,
    ) -> None:
        super().__init__(size, dim)
        self.similarity, self.momentum = similarity, momentum
        self.sharpness = _SHARPNESS[similarity] if sharpness is None else sharpness
        # Running mean of the squared distance of a part to its nearest entry, which scales the softmax; 0 at the start.
        self.register_buffer("spread", torch.zeros(()))

    @torch.no_grad()
    def describe(self, part_maps: Tensor) -> Tensor:
        """Return descriptions o [B, filled] of part maps [B, d, h, w]: distributions over the filled entries.

        Each location is softly assigned by squared distance, then locations are averaged. With a linear similarity,
        averaging locations first would give the same result, and the description would not depend on single parts.
        """
        batch, dim, height, width = part_maps.shape
        parts, entries = part_maps.permute(0, 2, 3, 1).reshape(-1, dim), self.filled
        if self.similarity == "cosine":
            parts, entries = F.normalize(parts, dim=1), F.normalize(entries, dim=1)
        distances = torch.cdist(parts, entries).square_()
        self._update_spread(distances.amin(dim=1).mean())
        assignment = torch.softmax(-self.sharpness / self.spread.clamp_min(1e-12) * distances, dim=1)
        return assignment.view(batch, height * width, -1).mean(dim=1)

    def _update_spread(self, nearest: Tensor) -> None:
        """Move the spread towards a batch's mean distance; the first distance becomes the spread."""
        later = self.spread.lerp(nearest, 1.0 - self.momentum) if self.training else self.spread
        updated = torch.where(self.spread == 0, nearest, later)
        # Chosen by tensor arithmetic, because an `if` would wait for the GPU.
        self.spread.copy_(torch.where(nearest.isfinite(), updated, self.spread))
